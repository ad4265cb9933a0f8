#!/usr/bin/env bash
# More tables of the Domino rollout on one GPU: the FP8 draft head, other models' shapes, other batch
# sizes, smaller candidate pools, and a verify width of 8.
#
#   bash benchmarks/rollout_extra.sh FOLDER
#
# Each table times base and fused stage C, few rounds of each, and is written into FOLDER as .json
# and .txt as soon as it is there: about three minutes on an H200. DEVICE, SHAPE, ROUNDS, REPLAYS
# and PYTHON may be set; DEVICE=cpu SHAPE=tiny runs all of them small, by the plain implementation.
set -euo pipefail

: "${1:?FOLDER for the results}"
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

shape=${SHAPE:-qwen3.6-27b}
device=${DEVICE:-cuda}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
implementation=fused
if [ "$device" = cpu ]; then implementation=plain; fi

measure() { # NAME SHAPE BATCHES OPTIONS...
    local name=$out/rollout_extra_$1 shape=$2 batches=$3 start=$SECONDS
    shift 3
    "$python" -m knockon bench rollout --shape "$shape" --device "$device" --batches "$batches" \
        --stages base,C --implementation "$implementation" --rounds "${ROUNDS:-3}" \
        --replays "${REPLAYS:-50}" --json "$name.json" "$@" | tee "$name.txt"
    echo "$(basename "$name"): $((SECONDS - start)) s" >&2
}

measure fp8_tp1 "$shape" 1,8,64 --draft-head-dtype fp8
measure fp8_one_rank_of_2 "$shape" 1,8,64 --draft-head-dtype fp8 --one-rank-of 2
measure steps_7 "$shape" 1,8,64 --steps 7
measure pool_512 "$shape" 1,8,64 --pool-size 512
measure pool_1024 "$shape" 1,8,64 --pool-size 1024
measure batches "$shape" 2,4,16,32,128
for other in qwen3-8b qwen3.5-4b; do
    if [ "$device" = cpu ]; then other=tiny; fi
    measure "$other" "$other" 1,8,64
done
