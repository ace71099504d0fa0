#!/usr/bin/env bash
# Instructions per trellis candidate of the SIMD encoder, counted with callgrind (valgrind has no
# AVX-512, so this counts the AVX2 encoder). A tile has 2 passes x 256 steps x 65,536 candidates.
# usage: scripts/count_instructions.sh [BITS ...]
set -euo pipefail
cd "$(dirname "$0")/.."
command -v valgrind >/dev/null || { echo "error: valgrind is not installed" >&2; exit 2; }
cargo build --release --quiet
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

count() { # BITS TILES -> instructions of the whole run
    valgrind --tool=callgrind --callgrind-out-file="$scratch/out" \
        target/release/exl3-candle --threads 1 bench encoder --bits "$1" --backend avx2 \
        --tiles "$2" --seconds 0 2>&1 >/dev/null | awk '/Collected/ {print $NF}'
}

[[ $# -gt 0 ]] || set -- 2 3 4
for bits in "$@"; do
    one=$(count "$bits" 1)
    two=$(count "$bits" 2)
    awk -v bits="$bits" -v d="$((two - one))" \
        'BEGIN { printf "%s bits: %.3f instructions per candidate\n", bits, d / (2 * 256 * 65536) }'
done
