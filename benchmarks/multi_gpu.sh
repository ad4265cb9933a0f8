#!/usr/bin/env bash
# The Domino rollout on every GPU of one host: parity across ranks, then the stage tables.
#
#   bash benchmarks/multi_gpu.sh FOLDER
#
# For each power of two up to the number of GPUs it writes rollout_SHAPE_tpN as .json, .png and
# .txt into FOLDER. Before a stage is timed, its proposals are compared on all ranks, in the graph
# and outside, and between stages B and C (at least 1,095 ids); a difference ends the run.
# It runs on .venv (with `pip install -e '.[bench]'` for the plots) where that is there, else on
# python3; it needs torch, transformers, typer, rich and matplotlib, not an installed Knockon.
# SHAPE (a name), BATCHES, DEVICE, RANKS and PYTHON may be set, e.g. DEVICE=cpu SHAPE=tiny RANKS="2 4".
set -euo pipefail

: "${1:?FOLDER for the results}"
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
shape=${SHAPE:-qwen3.6-27b}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}

gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
"$python" -c "import torch; print('torch', torch.__version__, '· GPUs', torch.cuda.device_count(),
      '· NCCL', torch.cuda.nccl.version() if torch.cuda.is_available() else 'none')"

ranks=${RANKS:-}
if [ -z "$ranks" ]; then
    for ((n = 2; n <= gpus; n *= 2)); do ranks+=" $n"; done
fi
if [ -z "$ranks" ]; then
    echo "error: needs two GPUs, found $gpus; or DEVICE=cpu RANKS=\"2 4\"" >&2
    exit 2
fi

for n in $ranks; do
    name=$out/rollout_${shape}_tp$n
    "$python" -m knockon bench rollout --shape "$shape" --device "${DEVICE:-cuda}" \
        --tp-size "$n" --batches "${BATCHES:-1,8,64}" --stages base,A,B,C \
        --json "$name.json" --plot "$name.png" | tee "$name.txt"
done
