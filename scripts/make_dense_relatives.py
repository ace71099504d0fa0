#!/usr/bin/env python3
"""Write fixtures/dense/: a small random checkpoint of each dense relative of Llama, with golden logits.

Needs the Python packages torch and transformers 5.17 (a CPU will do). The weights are random but leave
nothing without an effect: norm weights away from 1, biases away from 0. They are rounded to bf16 first; the
logits are those of an f32 eager forward of the rounded weights. No size is a multiple of 128. The tokenizer
is that of fixtures/micro-llama, which tests copy.

usage: scripts/make_dense_relatives.py [OUT]
"""

import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENS = 16
COMMON = {
    "num_hidden_layers": 2, "intermediate_size": 80, "vocab_size": 384, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1,
}
MODELS = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {
        "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "sliding_window": 64, "use_sliding_window": False, "tie_word_embeddings": False,
    }),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {
        "hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "tie_word_embeddings": True,
    }),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {
        "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": None,
        "tie_word_embeddings": False,
    }),
    "smollm": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {
        "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 1000,
        "tie_word_embeddings": True,
    }),
}


def randomize(model, generator):
    """Every parameter anew, rounded to bf16."""
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            value = 1.0 + 0.3 * noise
        elif name.endswith(".bias"):
            value = 0.5 * noise
        elif "embed_tokens" in name and not tied:
            value = noise
        else:
            value = 2.0 * noise / parameter.shape[-1] ** 0.5
        parameter.data = value.to(torch.bfloat16).to(torch.float32)


def main():
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "fixtures/dense"
    generator = torch.Generator().manual_seed(20250227)
    for name, (config_class, model_class, fields) in MODELS.items():
        config = config_class(**(COMMON | fields))
        config._attn_implementation = "eager"
        model = model_class(config).eval()
        randomize(model, generator)
        ids = torch.randint(3, 384, (1, TOKENS), generator=generator)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"input_ids": ids, "logits": logits.contiguous()}, folder / "golden.safetensors")
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        print(f"{name}: {sum(p.numel() for p in model.parameters())} weights, logits of {TOKENS} tokens "
              f"in {logits.min():.2f} to {logits.max():.2f}")


if __name__ == "__main__":
    main()
