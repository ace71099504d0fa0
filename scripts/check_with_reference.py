#!/usr/bin/env python3
"""Load bundles with the reference runtime (the Python package exllamav3, which needs a CUDA GPU) and
print perplexity and KL divergence from the source, under the protocol of scripts/kl_protocol.py. The
numbers are those of `exl3-candle eval kl`, from an independent forward pass in half precision.

usage: scripts/check_with_reference.py BUNDLE [BUNDLE ...]
"""

import math
import pathlib
import sys

import tokenizers
import torch
import torch.nn.functional as F
from exllamav3 import Config, Model

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "fixtures"
SOURCE = FIXTURES / "tiny-llama"
ROWS, COLS = 16, 512


def token_rows():
    tokenizer = tokenizers.Tokenizer.from_file(str(SOURCE / "tokenizer.json"))
    ids = tokenizer.encode((FIXTURES / "corpus/persuasion.txt").read_text()).ids
    return torch.tensor(ids[: ROWS * COLS]).view(ROWS, COLS)


def log_probabilities(folder, rows):
    """One [cols, vocab] tensor per row; padding behind the vocabulary is cut off."""
    config = Config.from_directory(str(folder))
    model = Model.from_config(config)
    model.load("cuda:0")
    vocab = config.vocab_size
    for row in rows:
        logits = model.forward(row[None], {"attn_mode": "flash_attn_nc"})
        yield F.log_softmax(logits[0, :, :vocab].float().cpu(), -1)
    model.unload()


def perplexity(rows, log_probs):
    nll = sum(-lp[:-1].gather(1, row[1:, None]).sum().item() for row, lp in zip(rows, log_probs))
    return math.exp(nll / (ROWS * (COLS - 1)))


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    rows = token_rows()
    source = list(log_probabilities(SOURCE, rows))
    print(f"{SOURCE}: perplexity {perplexity(rows, source):.4f}")
    for bundle in sys.argv[1:]:
        quantized = list(log_probabilities(bundle, rows))
        kl = sum((p.exp() * (p - q)).sum(-1).mean().item() for p, q in zip(source, quantized)) / ROWS
        print(f"{bundle}: perplexity {perplexity(rows, quantized):.4f}, KL {kl:.5f}")


if __name__ == "__main__":
    main()
