#!/usr/bin/env python3
"""Brings the large fixtures to the size at which they are stored.

    scripts/make_fixtures.py MODELS GOLDEN

MODELS holds the folders tiny-llama and tiny-qwen3_5 as trained, each with golden_forward.safetensors;
GOLDEN holds layer.safetensors and encode.safetensors as dumped. Writes into fixtures/:

- the shards of tiny-qwen3_5 as .xz, with the same bytes inside, and its other files;
- golden_forward.safetensors with the states HIDDEN and the logits of every STEP-th position;
- layer.safetensors.xz and encode.safetensors.xz, without what follows from the rest: encoded tiles
  (unpack the stored words), values (the codebook's), the reconstructed weight, and the rotated
  Hessian, which its factor tests.

Needs the Python packages numpy and safetensors.
"""
import lzma
import pathlib
import shutil
import sys

import numpy as np
from safetensors.numpy import load_file, save, save_file

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "fixtures"
# Positions whose logits are stored.
STEP = 8
HIDDEN = {"tiny-llama": (1, 3, 6), "tiny-qwen3_5": (1, 4, 8)}
DERIVED = ("encoded", "values", "weight_q_r", "h_rot")


def packed(data: bytes, element_bits: int) -> bytes:
    """Compressed, in the knowledge of how wide the elements are."""
    lc, lp = {16: (3, 1), 32: (1, 2)}[element_bits]
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": lc, "lp": lp, "pb": lp}]
    return lzma.compress(data, filters=filters)


def forward(source: pathlib.Path, name: str) -> None:
    golden = load_file(source / name / "golden_forward.safetensors")
    kept = {key: golden[key] for key in [f"hidden.{i}" for i in HIDDEN[name]]}
    kept["input_ids"] = golden["input_ids"]
    kept["logits"] = np.ascontiguousarray(golden["logits"][STEP - 1 :: STEP])
    save_file(kept, FIXTURES / name / "golden_forward.safetensors")


def compress(source: pathlib.Path, target: pathlib.Path) -> None:
    target.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.name == "golden_forward.safetensors":
            continue
        if path.suffix == ".safetensors":
            (target / f"{path.name}.xz").write_bytes(packed(path.read_bytes(), 16))
        elif path.name == "tokenizer.json":
            # tiny-llama's, byte for byte
            assert path.read_bytes() == (source.parent / "tiny-llama" / path.name).read_bytes()
        else:
            shutil.copyfile(path, target / path.name)


def main() -> None:
    models, golden = map(pathlib.Path, sys.argv[1:])
    for name in HIDDEN:
        (FIXTURES / name).mkdir(exist_ok=True)
        forward(models, name)
    compress(models / "tiny-qwen3_5", FIXTURES / "tiny-qwen3_5")
    for name in ("layer.safetensors", "encode.safetensors"):
        tensors = load_file(golden / name)
        kept = {key: t for key, t in tensors.items() if key.rsplit(".", 1)[-1] not in DERIVED}
        (FIXTURES / "golden" / f"{name}.xz").write_bytes(packed(save(kept), 32))


if __name__ == "__main__":
    main()
