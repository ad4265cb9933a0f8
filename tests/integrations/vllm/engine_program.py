"""A program of its own, since vLLM keeps global state: generate with vLLM's engine, Domino or not.

    python engine_program.py REQUEST.json ANSWER.pt

The request holds ``target``, ``dtype``, ``prompts`` (lists of token ids), ``max_tokens`` and
``drafts``: folders, or null for the target alone. For each, one after another, the answer holds
what was generated and every block that the rollout was handed, with the tokens that it gave.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch


def record(blocks: list[dict[str, Any]]) -> None:
    """Keep what every call of a rollout takes and gives."""
    from knockon.rollout import DominoRollout

    call = DominoRollout.__call__

    def recorded(self: Any, hidden: Any, bonus: Any, steps: int, **options: Any) -> Any:
        tokens = call(self, hidden, bonus, steps, **options)
        blocks.append({"hidden": hidden.clone(), "bonus": bonus.clone(), "tokens": tokens.clone()})
        return tokens

    DominoRollout.__call__ = recorded


def generate(request: dict[str, Any], draft: str | None) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    speculative = {"method": "dflash", "model": draft, "num_speculative_tokens": request["tokens"]}
    engine = LLM(
        model=request["target"],
        dtype=request["dtype"],
        skip_tokenizer_init=True,
        max_model_len=request.get("max_model_len", 128),
        max_num_seqs=4,
        max_num_batched_tokens=512,
        enforce_eager=True,
        enable_prefix_caching=request.get("prefix_caching", False),
        speculative_config=speculative if draft else None,
        disable_log_stats=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    counted = {
        metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")
    }
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": counted.get("vllm:spec_decode_num_drafts", 0),
        "accepted": counted.get("vllm:spec_decode_num_accepted_tokens", 0),
    }


def main() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    blocks: list[dict[str, Any]] = []
    record(blocks)
    answers = []
    for draft in request["drafts"]:
        blocks.clear()
        answers.append(generate(request, draft) | {"blocks": list(blocks)})
        gc.collect()
        cleanup_dist_env_and_memory()
    torch.save(answers, sys.argv[2])


if __name__ == "__main__":
    main()
