"""One run of vLLM's engine in a process of its own, since vLLM keeps global state.

    python -m knockon.bench.vllm.run REQUEST.json ANSWER.pt

:func:`run_vllm` starts it. Only this process imports vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knockon.errors import KnockonError


@dataclass(frozen=True)
class VllmRun:
    """What is asked of vLLM.

    Attributes:
        draft: a drafter's folder, or ``None`` for the target alone.
        prompts: token ids.
        proposals: ``num_speculative_tokens``.
        concurrency: requests in flight at most.
        eager: without CUDA graphs and compilation.
        record: keep every block that a rollout is handed, and the tokens it gives; needs ``eager``,
            since a graph's replay calls nothing.
        repeats: timed runs after one that warms up; 0 times the first run itself.
        speculative: further fields of vLLM's ``speculative_config``.
        engine: further arguments of ``vllm.LLM``.
        sampling: further fields of ``vllm.SamplingParams``.
    """

    target: str
    prompts: Sequence[Sequence[int]]
    draft: str | None = None
    max_tokens: int = 32
    proposals: int = 15
    concurrency: int = 4
    max_model_len: int = 512
    dtype: str = "bfloat16"
    eager: bool = False
    record: bool = False
    repeats: int = 0
    speculative: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class VllmAnswer:
    """What came of it.

    Attributes:
        tokens: generated ids by prompt. logprobs: by prompt and token, ``{id: log-probability}``,
            where they were asked for.
        seconds: of each timed run. drafts, accepted: blocks verified and proposals accepted in all
            timed runs.
        blocks: ``hidden [B, L, H]``, ``bonus [B]`` and ``tokens [B, L - 1]`` of each call recorded.
    """

    version: str
    tokens: list[list[int]]
    logprobs: list[list[dict[int, float]]]
    seconds: list[float]
    drafts: int
    accepted: int
    blocks: list[dict[str, Tensor]]

    @property
    def accept_length(self) -> float:
        """Tokens gained per verification, the bonus included; 0 without a drafter."""
        return 1 + self.accepted / self.drafts if self.drafts else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of the best run."""
        return sum(map(len, self.tokens)) / min(self.seconds)


def run_vllm(
    run: VllmRun, folder: Path, environment: Mapping[str, str] | None = None
) -> VllmAnswer:
    """Start a process that does ``run``; files go to ``folder``.

    Args:
        environment: variables set for it besides this process's own.

    Raises:
        KnockonError: it failed; the message ends with what it printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked, answer = folder / "request.json", folder / "answer.pt"
    asked.write_text(json.dumps(asdict(run)))
    source = str(Path(__file__).parents[3])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | dict(environment or {})
    command = [sys.executable, "-m", "knockon.bench.vllm.run", str(asked), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise KnockonError(f"vLLM failed: {(done.stdout + done.stderr)[-4000:]}")
    found: VllmAnswer = torch.load(answer, weights_only=False)
    return found


def _answer(run: VllmRun) -> VllmAnswer:
    blocks: list[dict[str, Tensor]] = []
    if run.record:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
        _record(blocks)
    import vllm

    speculative = {
        "method": "dflash",
        "model": run.draft,
        "num_speculative_tokens": run.proposals,
        **run.speculative,
    }
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_num_seqs": run.concurrency,
        "max_num_batched_tokens": max(2048, 2 * run.max_model_len),
        "enable_prefix_caching": False,
        **run.engine,
    }
    engine = vllm.LLM(
        model=run.target,
        dtype=run.dtype,
        max_model_len=run.max_model_len,
        enforce_eager=run.eager,
        speculative_config=speculative if run.draft else None,
        disable_log_stats=False,
        **options,
    )
    sampling = {"temperature": 0.0, "detokenize": False, **run.sampling}
    params = vllm.SamplingParams(max_tokens=run.max_tokens, **sampling)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in run.prompts]

    def generate() -> tuple[Any, float]:
        start = time.perf_counter()
        return engine.generate(prompts, params, use_tqdm=False), time.perf_counter() - start

    if run.repeats:
        generate()
    before = _counts(engine)
    timed = [generate() for _ in range(max(1, run.repeats))]
    after = _counts(engine)
    outputs = [output.outputs[0] for output in timed[-1][0]]
    return VllmAnswer(
        version=vllm.__version__,
        tokens=[list(output.token_ids) for output in outputs],
        logprobs=[
            [{i: p.logprob for i, p in row.items()} for row in output.logprobs or ()]
            for output in outputs
        ],
        seconds=[seconds for _, seconds in timed],
        drafts=after[0] - before[0],
        accepted=after[1] - before[1],
        blocks=blocks,
    )


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


if __name__ == "__main__":
    # By its importable name, so that the answer can be read by another program.
    from knockon.bench.vllm import run as module

    request = module.VllmRun(**json.loads(Path(sys.argv[1]).read_text()))
    torch.save(module._answer(request), sys.argv[2])
