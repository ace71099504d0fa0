#!/usr/bin/env python3
"""Compile the OpenCL kernels for Intel Arc, without such a device, and check what the compiler made of them.

Every variant that a conversion measures on Arc is compiled with Intel's offline compiler. A kernel that
spills registers or uses private memory fails. Prints the table of docs/OPENCL.md.

Needs `ocloc` (Debian: intel-opencl-icd, libigc-tools) and cargo.

usage: arc_kernels.py [--ocloc PATH] [--device acm-g10] [--all]
"""
import argparse
import collections
import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"


def variants():
    """The variants with their build options, as the program makes them."""
    command = ["cargo", "run", "-q", "--release", "--locked", "--example", "kernel_options"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def compiled(ocloc, device, kernel, options):
    """The compiler's binary of one kernel; exits with its messages if it refuses or warns."""
    with tempfile.TemporaryDirectory() as out:
        build = f"-cl-std=CL3.0 -Werror -I {KERNELS} {options}"
        command = [ocloc, "compile", "-q", "-file", str(KERNELS / f"{kernel}.cl"), "-device", device]
        command += ["-options", build, "-out_dir", out, "--format", "zebin"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode and "Invalid option" in done.stdout:  # newer ones write zebin only
            done = subprocess.run(command[:-2], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        # Older compilers have no field for spilled registers, and warn.
        if done.returncode or "spill" in done.stdout.lower():
            sys.exit(f"error: {kernel} for {device} ({options}):\n{done.stdout}")
        return next(Path(out).glob("*.bin")).read_bytes()


def ze_info(binary):
    """The text of the ELF section .ze_info."""
    if binary[:4] != b"\x7fELF":
        sys.exit("error: the compiler wrote no ELF file")
    (offset,) = struct.unpack_from("<Q", binary, 0x28)
    entry, count, names_at = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", binary, offset + i * entry) for i in range(count)]
    names = binary[headers[names_at][4] :][: headers[names_at][5]]
    for header in headers:
        if names[header[0] :].split(b"\0", 1)[0] == b".ze_info":
            return binary[header[4] : header[4] + header[5]].rstrip(b"\0").decode()
    sys.exit("error: the binary has no section .ze_info")


def facts(text, what):
    """SLM bytes, SIMD width and registers of a kernel that neither spills nor uses private memory."""
    found = {name: int(value) for name, value in re.findall(r"^\s*(\w+_size|grf_count):\s*(\d+)\s*$", text, re.M)}
    for forbidden in ("spill_size", "private_size"):
        if found.get(forbidden):
            sys.exit(f"error: {what}: {forbidden} is {found[forbidden]}")
    return found.get("slm_size", 0), found["simd_size"], found["grf_count"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ocloc", default="ocloc")
    parser.add_argument("--device", default="acm-g10")
    parser.add_argument("--all", action="store_true", help="all variants in the table, not the first of each rate")
    args = parser.parse_args()

    print(f"| kernel on `{args.device}` | bits | variant | SLM bytes | SIMD | registers |")
    print("| --- | --- | --- | --- | --- | --- |")
    checked, seen = 0, collections.Counter()
    for variant in variants():
        rate = (variant["len"], variant["bits"])
        seen[rate] += 1
        for kernel in ("forward", "trace"):
            if kernel == "trace" and seen[rate] > 1:
                continue  # the traceback is the same for all variants
            what = f"{kernel} {variant['variant']} at {variant['bits']} bits"
            slm, simd, registers = facts(ze_info(compiled(args.ocloc, args.device, kernel, variant["options"])), what)
            checked += 1
            if args.all or (seen[rate] == 1 and variant["len"] == 256):
                name = variant["variant"] if kernel == "forward" else ""
                print(f"| {kernel} | {variant['bits']:g} | {name} | {slm} | {simd} | {registers} |", flush=True)
    print(f"\n{checked} kernels: none spills, none uses private memory")


if __name__ == "__main__":
    main()
