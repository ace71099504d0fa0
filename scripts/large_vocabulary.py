#!/usr/bin/env python3
"""Show that evaluation stays in bounded memory for a vocabulary of 248,320 tokens.

Makes a small random Llama of that vocabulary and runs `eval kl` of it against itself under
/usr/bin/time. All logits of the rows at once would take 4 bytes x rows x cols x vocabulary for each
model. Exit code 1 if the peak is above --limit MiB or the divergence is not 0.

usage: scripts/large_vocabulary.py [--rows 4] [--cols 512] [--limit 1024]
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
MICRO = ROOT / "fixtures/micro-llama"
VOCABULARY = 248_320


def write_model(path, rng):
    """micro-llama with another vocabulary: embedding and head are made, the layers random too."""
    config = json.loads((MICRO / "config.json").read_text()) | {"vocab_size": VOCABULARY}
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MICRO / name, path / name)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (VOCABULARY, hidden), "lm_head.weight": (VOCABULARY, hidden),
              "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for linear, shape in (("self_attn.q_proj", (heads, hidden)), ("self_attn.k_proj", (kv, hidden)),
                              ("self_attn.v_proj", (kv, hidden)), ("self_attn.o_proj", (hidden, heads)),
                              ("mlp.gate_proj", (inner, hidden)), ("mlp.up_proj", (inner, hidden)),
                              ("mlp.down_proj", (hidden, inner))):
            shapes[f"{at}{linear}.weight"] = shape
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            scale = 1.0 if "norm" in name else shape[-1] ** -0.5
            file.write((rng.standard_normal(shape, dtype=np.float32) * scale).astype("<f2").tobytes())


def main():
    parser = argparse.ArgumentParser(description="Evaluate a model of a very large vocabulary.")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--cols", type=int, default=512)
    parser.add_argument("--limit", type=int, default=1024, help="MiB")
    parser.add_argument("--binary", default=str(ROOT / "target/release/exl3-candle"))
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as work:
        model, rows = pathlib.Path(work) / "model", pathlib.Path(work) / "rows.json"
        model.mkdir()
        write_model(model, rng)
        rows.write_text(json.dumps({"rows": rng.integers(0, VOCABULARY, (args.rows, args.cols)).tolist()}))
        done = subprocess.run(["/usr/bin/time", "-v", args.binary, "eval", "kl", model, model, "--text", rows, "--rows",
                               str(args.rows), "--cols", str(args.cols), "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    peak = int(re.search(r"Maximum resident set size \(kbytes\): (\d+)", done.stderr)[1]) / 1024
    elapsed = re.search(r"Elapsed .*: ([\d:.]+)", done.stderr)[1]
    result = json.loads(done.stdout)
    whole = 4 * args.rows * args.cols * VOCABULARY / 2**20
    print(f"vocabulary {VOCABULARY}, {args.rows} x {args.cols} tokens: KL(x, x) {result['kl']['mean']}, "
          f"floor {result['bf16_floor']['mean']:.2e}")
    print(f"peak {peak:.0f} MiB in {elapsed} (all logits of one model: {whole:.0f} MiB, its head in f32: "
          f"{4 * 128 * VOCABULARY / 2**20:.0f} MiB; limit {args.limit} MiB)")
    return 1 if peak > args.limit or result["kl"]["max"] != 0 else 0


if __name__ == "__main__":
    sys.exit(main())
