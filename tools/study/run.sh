#!/usr/bin/env bash
# run.sh OUT SECONDS CORPUS [OPTIONS]: the whole study on one GPU; it stops by itself in time.
# Needs torch, transformers, peft, bitsandbytes and this tree on PYTHONPATH or installed.
set -uo pipefail
out=$1 seconds=$2 corpus=$3; shift 3
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH=$root/tools:$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$out"
out=$(cd "$out" && pwd); corpus=$(realpath "$corpus")
cd "$root" && exec timeout -k 5 $((seconds + 15)) python3 -m study.run \
    --out "$out" --corpus "$corpus" --seconds "$seconds" "$@"
