#!/usr/bin/env bash
# Runs the OpenCL kernels in a simulator that reports data races, reads of uninitialized memory and
# accesses out of bounds. Rings of 8 weights: every line of the kernels runs, in seconds.
# Needs `oclgrind-kernel` (Debian: oclgrind).
set -euo pipefail
cd "$(dirname "$0")/../kernels"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Buffers: tiles, table of values, start nodes or history and so on, in the order of the kernels' arguments.
simulate() { # kernel, pass, options
    local kernel=$1 pass=$2 options=$3 group=$4 history
    history="<size=$((2 * 8 * (65536 >> bits) * 2)) ushort fill=13378>"
    local tiles="<size=64 float fill=0.7>" table="<size=262144 float fill=0.5>"
    local start="<size=4 ushort fill=3>" states="<size=32 ushort fill=0>"
    local buffers=("$tiles" "$table" "$start" "$history")
    [[ $kernel == trace ]] && buffers=("$tiles" "$table" "$history" "$start" "$states")
    printf '%s\n' "$kernel.cl" "$kernel" "$((2 * group)) 1 1" "$group 1 1" "${buffers[@]}" \
        "<size=4 fill=$pass int>" >"$work/case.sim"
    cp ./*.cl ./*.h "$work"
    # Its exit code is always 0.
    (cd "$work" && oclgrind-kernel --data-races --uninitialized --build-options "$options" case.sim) \
        >"$work/log" 2>&1 || true
    if [[ -s $work/log ]]; then
        echo "error: $kernel, pass $pass ($options):" >&2
        head -20 "$work/log" >&2
        exit 1
    fi
}

runs=0
for costs in 0 1; do
    for rate in "6 0" "2 1"; do
        read -r bits half <<<"$rate"
        for pass in 1 2; do
            options="-cl-std=CL1.2 -I . -DARITHMETIC=0 -DVALUES=0 -DCOSTS=$costs -DBITS=$bits -DHALF_RATE=$half"
            options+=" -DLEN=8 -DWORK_GROUP=32 -DRUN=16 -DSPLIT=1 -DTRACE_GROUP=32"
            [[ $costs == 1 && $bits == 2 ]] && continue # the costs exceed the simulator's local memory
            simulate forward "$pass" "$options" 32
            simulate trace "$pass" "$options" 32
            runs=$((runs + 2))
        done
    done
done
echo "$runs runs: no race, nothing uninitialized, nothing out of bounds"
