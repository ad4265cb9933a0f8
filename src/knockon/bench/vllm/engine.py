"""vLLM's engine in this process: started once, given requests, timed. Only ``run.py`` calls it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from knockon.bench.partings import first_partings
from knockon.bench.vllm.run import VllmAnswer, VllmRun
from knockon.bench.vllm.ties import Difference, judge


@dataclass
class Generated:
    """What one pass over the prompts gave; the fields are those of :class:`VllmAnswer`."""

    tokens: list[list[int]]
    logprobs: list[list[dict[int, float]]]
    seconds: float = 0.0
    full_steps: list[float] = field(default_factory=list)


def answers(runs: Sequence[VllmRun]) -> list[VllmAnswer]:
    """Do ``runs``, which agree in all that the engine is started with."""
    blocks: list[dict[str, Tensor]] = []
    if runs[0].record:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
        _record(blocks)
    engine = _start(runs[0], max(run.concurrency for run in runs))
    found = []
    for run in runs:
        blocks.clear()
        found.append(_answer(engine, run, blocks))
    return found


def _start(run: VllmRun, requests: int) -> Any:
    import vllm

    speculative = {
        "method": "dflash",
        "model": run.draft,
        "num_speculative_tokens": run.proposals,
        **run.speculative,
    }
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_num_seqs": requests,
        "max_num_batched_tokens": max(2048, 2 * run.max_model_len),
        "enable_prefix_caching": False,
        **run.engine,
    }
    return vllm.LLM(
        model=run.target,
        dtype=run.dtype,
        max_model_len=run.max_model_len,
        enforce_eager=run.eager,
        speculative_config=speculative if run.draft else None,
        disable_log_stats=False,
        **options,
    )


def _answer(engine: Any, run: VllmRun, blocks: list[dict[str, Tensor]]) -> VllmAnswer:
    import vllm

    sampling = {"max_tokens": run.max_tokens, **run.sampling}
    if run.repeats:
        generate(engine.llm_engine, run.prompts, sampling, run.concurrency)
    before = _counts(engine)
    timed = [
        generate(engine.llm_engine, run.prompts, sampling, run.concurrency)
        for _ in range(max(1, run.repeats))
    ]
    after = _counts(engine)
    last = timed[-1]
    return VllmAnswer(
        version=vllm.__version__,
        tokens=last.tokens,
        logprobs=last.logprobs,
        seconds=[once.seconds for once in timed],
        drafts=after[0] - before[0],
        accepted=after[1] - before[1],
        blocks=list(blocks),
        full_steps=[step for once in timed for step in once.full_steps],
        differences={
            name: _differences(engine, run, last.tokens, others)
            for name, others in run.compare.items()
        },
    )


def generate(
    engine: Any, prompts: Sequence[Sequence[int]], sampling: dict[str, Any], concurrency: int
) -> Generated:
    """Answer ``prompts``, ``concurrency`` of them in flight.

    Args:
        engine: vLLM's ``LLMEngine``.
        sampling: fields of ``vllm.SamplingParams``; greedy unless they say otherwise.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked = {"temperature": 0.0, "detokenize": False} | sampling
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, **asked)
    found = Generated([[] for _ in prompts], [[] for _ in prompts])
    waiting = deque(enumerate(prompts))
    flying: dict[str, int] = {}
    full = None  # when the last step ended, if it was a full one
    start = time.perf_counter()
    while waiting or flying:
        while waiting and len(flying) < concurrency:
            index, prompt = waiting.popleft()
            engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
            flying[str(index)] = index
            full = None
        outputs = [
            output for output in engine.step() if output.outputs[0].token_ids or output.finished
        ]
        now = time.perf_counter()
        gained = sum(bool(output.outputs[0].token_ids) for output in outputs)
        if outputs:
            if gained == concurrency and full is not None:
                found.full_steps.append(now - full)
            full = now if gained == concurrency else None
        for output in outputs:
            index, part = flying[output.request_id], output.outputs[0]
            found.tokens[index].extend(part.token_ids)
            found.logprobs[index].extend(
                {token: p.logprob for token, p in row.items()} for row in part.logprobs or ()
            )
            if output.finished:
                del flying[output.request_id]
    found.seconds = time.perf_counter() - start
    return found


def _differences(
    engine: Any, run: VllmRun, alone: list[list[int]], others: Sequence[Sequence[int]]
) -> list[Difference]:
    gaps = first_partings(alone, others)
    prompts = [[*run.prompts[answer], *alone[answer][:at]] for answer, at in gaps]
    asked = {"max_tokens": 1, "logprobs": 20}
    rows = generate(engine.llm_engine, prompts, asked, run.concurrency).logprobs
    return judge(alone, others, gaps, [row[0] for row in rows])


def _counts(engine: Any) -> tuple[int, int]:
    found = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    names = ("num_drafts", "num_accepted_tokens")
    drafts, accepted = (int(found.get(f"vllm:spec_decode_{name}", 0)) for name in names)
    return drafts, accepted


def _record(blocks: list[dict[str, Tensor]]) -> None:
    """Keep what every call of a rollout takes and gives."""
    from knockon.rollout import DominoRollout

    call = DominoRollout.__call__

    def recorded(
        self: DominoRollout, hidden: Tensor, bonus: Tensor, steps: int, **options: Any
    ) -> Tensor:
        tokens = call(self, hidden, bonus, steps, **options)
        kept = {"hidden": hidden, "bonus": bonus, "tokens": tokens}
        blocks.append({name: tensor.detach().cpu().clone() for name, tensor in kept.items()})
        return tokens

    DominoRollout.__call__ = recorded  # type: ignore[assignment,method-assign]
