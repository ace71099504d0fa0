#!/usr/bin/env python3
"""Convert a tiny model at several bit rates and seeds and compare with the reference's numbers.

Calibration: the first 128 x 512 tokens of fixtures/corpus/northanger.txt. Evaluation: the first
16 x 512 tokens of fixtures/corpus/persuasion.txt. One seed says little (the signs alone move the KL
by 3 % at 2 bits), so the ratio that counts is that of the mean over the seeds. Exit code 1 if a
mean is above --limit times the reference.

usage: scripts/kl_protocol.py [--model tiny-llama|tiny-qwen3_5|FOLDER] [--bits 2,3,4] [--seeds 1,2,3]
           [--work DIR] [--limit 1.03]

A FOLDER is compared with fixtures/reference_NAME.json, by its own name.
"""

import argparse
import json
import lzma
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"
HEADER = ("bits", "seed", "perplexity", "kl", "ratio", "top1", "proxy")
ROW = "{:>5} {:>5} {:>11} {:>9} {:>7} {:>7} {:>9}"


def run(binary, *args):
    """The JSON document that a command prints."""
    done = subprocess.run([binary, *map(str, args), "--json"], stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(map(str, args))}: exit code {done.returncode}")
    return json.loads(done.stdout)


def model_folder(name, work):
    """fixtures/NAME or the folder NAME; a fixture with compressed shards is unpacked."""
    folder = FIXTURES / name if (FIXTURES / name).is_dir() else pathlib.Path(name).resolve()
    if not any(folder.glob("*.xz")):
        return folder
    unpacked = work / name
    unpacked.mkdir(exist_ok=True)
    for path in [*folder.iterdir(), FIXTURES / "tiny-llama/tokenizer.json"]:
        if path.suffix == ".xz":
            (unpacked / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
        else:
            shutil.copy(path, unpacked)
    return unpacked


def measure(binary, model, bits, seed, codebook, work):
    out = work / f"{model.name}-{codebook}-{bits}bpw-seed{seed}"
    convert = run(binary, "convert", model, "-o", out, "--bits", bits, "--seed", seed, "--codebook", codebook,
                  "--calibration", FIXTURES / "corpus/northanger.txt", "--rows", 128, "--cols", 512, "--overwrite")
    kl = run(binary, "eval", "kl", model, out, "--text", FIXTURES / "corpus/persuasion.txt", "--rows", 16, "--cols", 512)
    return {"perplexity": kl["perplexity"], "kl": kl["kl"]["mean"], "top1": kl["top1"],
            "proxy": convert["mean_proxy_error"]}


def line(bits, seed, values, reference):
    ratio = f"{values['kl'] / reference['kl_mean']:.3f}" if reference else "-"
    return ROW.format(bits, seed, f"{values['perplexity']:.3f}", f"{values['kl']:.4f}", ratio,
                      f"{values['top1']:.4f}", f"{values['proxy']:.6f}")


def main():
    parser = argparse.ArgumentParser(description="Compare conversions of a tiny model with the reference's.")
    parser.add_argument("--model", default="tiny-llama", help="tiny-llama, tiny-qwen3_5 or a folder")
    parser.add_argument("--bits", help="default: all of the reference's")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--codebook", default="mul1")
    parser.add_argument("--limit", type=float, default=1.03, help="highest ratio of mean KL to the reference's")
    parser.add_argument("--binary", default=str(ROOT / "target/release/exl3-candle"))
    parser.add_argument("--work", type=pathlib.Path, help="keep the bundles here")
    args = parser.parse_args()
    seeds = args.seeds.split(",")
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or pathlib.Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        model = model_folder(args.model, work)
        sizes = json.loads((FIXTURES / f"reference_{model.name}.json").read_text())["sizes"]
        rates = args.bits.split(",") if args.bits else [bits for bits in sizes if ":" not in bits]
        print(ROW.format(*HEADER), flush=True)
        for bits in rates:
            reference = sizes.get(bits if args.codebook == "mul1" else f"{bits}:{args.codebook}")
            results = []
            for seed in seeds:
                results.append(measure(args.binary, model, bits, seed, args.codebook, work))
                print(line(bits, seed, results[-1], reference), flush=True)
            mean = {key: sum(result[key] for result in results) / len(results) for key in results[0]}
            print(line(bits, "mean", mean, reference), flush=True)
            if reference:
                print(line(bits, "ref", {"perplexity": reference["perplexity"], "kl": reference["kl_mean"],
                                         "top1": reference["top1"], "proxy": reference["mean_proxy_error"]},
                           reference), flush=True)
                worst = max(worst, mean["kl"] / reference["kl_mean"])
    print(f"highest ratio of mean KL to the reference: {worst:.3f} (limit {args.limit})")
    return 1 if worst > args.limit else 0


if __name__ == "__main__":
    sys.exit(main())
