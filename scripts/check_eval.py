#!/usr/bin/env python3
"""Compute again in numpy, from exported logits, what `eval kl` prints.

Runs `eval kl` of a model against its source with --source-logits, which leaves the source's logits
in a safetensors file, and of the model against itself, which leaves the model's. Every statistic is
then computed from the two files alone. Exit code 1 if a number differs by more than --tolerance.

usage: scripts/check_eval.py SOURCE MODEL --text FILE [--rows 16] [--cols 512]
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent


def tensor(path, name):
    """A tensor of a safetensors file, not read before it is used."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        info = json.loads(file.read(length))[name]
    dtype = {"F32": "<f4", "F64": "<f8", "U64": "<u8"}[info["dtype"]]
    offset = 8 + length + info["data_offsets"][0]
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=tuple(info["shape"]))


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def compare(p_file, q_file, top_k):
    """Per position: KL in both directions, equality of the argmax, shared part of the top k, confidence."""
    columns = []
    for p_row, q_row in zip(tensor(p_file, "logits"), tensor(q_file, "logits")):
        p, q = log_softmax(p_row), log_softmax(q_row)
        top = [np.argsort(-x, axis=-1, kind="stable")[:, :top_k] for x in (p_row, q_row)]
        shared = [len(set(a) & set(b)) / top_k for a, b in zip(*top)]
        columns.append((np.sum(np.exp(p) * (p - q), -1), np.sum(np.exp(q) * (q - p), -1),
                        p_row.argmax(-1) == q_row.argmax(-1), np.array(shared), np.exp(p.max(-1))))
    return [np.stack(column) for column in zip(*columns)]


def expected(p_file, q_file, found):
    kl, reverse, same, shared, confidence = compare(p_file, q_file, found["top_k"]["k"])
    floor = tensor(p_file, "floor")
    yield "top1", found["top1"], same.mean()
    yield "top_k", found["top_k"]["agreement"], shared.mean()
    yield "excess_kl", found["excess_kl"], kl.mean() - floor.mean()
    for key, values in (("kl", kl), ("reverse_kl", reverse), ("bf16_floor", floor)):
        values = np.sort(values, axis=None)
        yield f"{key}.mean", found[key]["mean"], values.mean()
        yield f"{key}.standard_error", found[key]["standard_error"], values.std(ddof=1) / np.sqrt(values.size)
        for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            yield f"{key}.{name}", found[key][name], values[int((values.size - 1) * share + 0.5)]
    for bucket in found["by_position"]:
        part = slice(bucket["from"], bucket["to"])
        yield f"position {bucket['from']}", bucket["kl"], kl[:, part].mean()
    for bucket in found["by_confidence"]:
        inside = (confidence >= bucket["from"]) & ((confidence < bucket["to"]) | (bucket["to"] == 1.0))
        if inside.any():
            yield f"confidence {bucket['from']}", bucket["kl"], kl[inside].mean()


def main():
    parser = argparse.ArgumentParser(description="Check eval kl against numpy on exported logits.")
    parser.add_argument("source")
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--rows", default="16")
    parser.add_argument("--cols", default="512")
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--binary", default=str(ROOT / "target/release/exl3-candle"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        def kl(source, file):
            done = subprocess.run([args.binary, "eval", "kl", source, args.model, "--text", args.text, "--rows", args.rows,
                                   "--cols", args.cols, "--source-logits", file, "--json"],
                                  stdout=subprocess.PIPE, check=True)
            return json.loads(done.stdout)

        p_file, q_file = pathlib.Path(work) / "p.safetensors", pathlib.Path(work) / "q.safetensors"
        found = kl(args.source, p_file)
        kl(args.model, q_file)
        worst = 0.0
        for name, value, right in expected(p_file, q_file, found):
            worst = max(worst, abs(value - right))
            print(f"{name:<26} {value:>14.9f} {right:>14.9f} {abs(value - right):>9.1e}")
    print(f"largest difference: {worst:.1e} (tolerance {args.tolerance:.0e})")
    return 0 if worst <= args.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
