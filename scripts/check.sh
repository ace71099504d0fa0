#!/usr/bin/env bash
# Everything a change must pass: format, lints, tests. The same as CI runs.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo fmt --check
cargo clippy --release --locked --all-targets -- -D warnings
cargo test --release --locked
