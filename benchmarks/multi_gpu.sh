#!/usr/bin/env bash
# Every GPU of one host: the rollout's parity and stage tables, then a real model, offline and served.
#
#   bash benchmarks/multi_gpu.sh FOLDER
#
# For each power of two up to the number of GPUs it
# - runs the engine's tests on that many GPUs,
# - writes rollout_SHAPE_tpN as .json, .png and .txt into FOLDER. Before a stage is timed, its
#   proposals are compared on all ranks, in the graph and outside, and between stages B and C (at
#   least 1,095 ids); a difference ends the run. A profile of one block counts the collectives.
# - writes end_to_end_tpN as .json and .txt: SmolLM2 with its drafter (tensor_parallel_end_to_end.py).
# It runs on .venv (with `pip install -e '.[bench]'` for the plots) where that is there, else on
# python3; it needs torch, transformers, typer, rich, matplotlib, pytest and the server's
# dependencies, not an installed Knockon, and the model (`knockon models pull smollm2-135m`).
# SHAPE (a name), BATCHES, DEVICE, RANKS, PROMPTS (JSON lines for the real model), PARTS and PYTHON
# may be set, e.g. DEVICE=cpu SHAPE=tiny RANKS="2 4" PARTS=rollout.
set -euo pipefail

: "${1:?FOLDER for the results}"
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
shape=${SHAPE:-qwen3.6-27b}
parts=" ${PARTS:-tests rollout end_to_end} "
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

failed=0
for n in $ranks; do
    if [[ $parts == *" tests "* ]]; then
        "$python" -m pytest -q -m gpu -n 3 -p no:cacheprovider -p no:benchmark tests/engine/test_gpu_ranks.py -k "ranks${n}" \
            | tee "$out/tests_tp$n.txt" || failed=1
    fi
    if [[ $parts == *" rollout "* ]]; then
        name=$out/rollout_${shape}_tp$n
        "$python" -m knockon bench rollout --shape "$shape" --device "${DEVICE:-cuda}" \
            --tp-size "$n" --batches "${BATCHES:-1,8,64}" --stages base,A,B,C \
            --json "$name.json" --plot "$name.png" | tee "$name.txt" || failed=1
    fi
    if [[ $parts == *" end_to_end "* ]]; then
        "$python" benchmarks/tensor_parallel_end_to_end.py --ranks "$n" --device "${DEVICE:-cuda}" \
            ${PROMPTS:+--prompts "$PROMPTS"} --out "$out" | tee "$out/end_to_end_tp$n.txt" || failed=1
    fi
done
exit $failed
