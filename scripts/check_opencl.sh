#!/usr/bin/env bash
# What the tests cannot show of the OpenCL kernels: native half arithmetic on Intel's CPU runtime, data
# races, and what Intel's compiler makes of them for Arc.
#
# Needs Python 3 with venv, and ocloc and oclgrind (Debian: intel-opencl-icd libigc-tools oclgrind). Intel's
# CPU runtime is a Python package of 276 MB; it is installed once, into target/intel-opencl.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/check_races.sh
scripts/arc_kernels.py

venv=target/intel-opencl
if [[ ! -e $venv/lib/libintelocl.so ]]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q intel-opencl-rt==2026.2.0 intel-cmplr-lib-rt==2026.2.0
fi
# Only the runtime that is meant, and no silence if it is not found.
export OCL_ICD_VENDORS=$PWD/$venv/lib/libintelocl.so EXL3_CANDLE_REQUIRE_OPENCL=1
cargo test --release --locked --test encode golden
cargo test --release --locked --test opencl every_variant
