#!/usr/bin/env bash
# The stage tables of the Domino rollout on one GPU: the whole vocabulary, then one rank of two.
#
#   bash benchmarks/rollout_h200.sh FOLDER
#
# Writes rollout_SHAPE_tp1 and rollout_SHAPE_one_rank_of_2 as .json, .png and .txt into FOLDER.
# It runs on .venv (with `pip install -e '.[bench]'` for the plots) where that is there, else on
# python3; it needs torch, transformers, typer, rich and matplotlib, not an installed Knockon.
# SHAPE (a name), DEVICE, BATCHES and PYTHON may be set, e.g. SHAPE=tiny DEVICE=cpu BATCHES=1,2.
set -euo pipefail

: "${1:?FOLDER for the results}"
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

shape=${SHAPE:-qwen3.6-27b}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}

measure() { # NAME OPTIONS...
    local name=$out/rollout_${shape}_$1
    shift
    "$python" -m knockon bench rollout --shape "$shape" --device "${DEVICE:-cuda}" \
        --batches "${BATCHES:-1,8,64}" --stages base,A,B,C \
        --json "$name.json" --plot "$name.png" "$@" | tee "$name.txt"
}

measure tp1 --tp-size 1
measure one_rank_of_2 --one-rank-of 2
