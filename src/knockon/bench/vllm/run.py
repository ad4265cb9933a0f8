"""Runs of vLLM's engine in a process of its own, since vLLM keeps global state.

    python -m knockon.bench.vllm.run REQUEST.json ANSWER.pt

:func:`run_vllm` starts it. An engine takes long to start:
:func:`run_together` lets one do several runs in turn. Only this process imports vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from knockon.bench.vllm.ties import Answers, Difference
from knockon.errors import KnockonError, Refused

# What an engine is started with; runs that share one agree in these.
OF_THE_ENGINE = (
    "target",
    "draft",
    "proposals",
    "max_model_len",
    "dtype",
    "eager",
    "record",
    "speculative",
    "engine",
)


@dataclass(frozen=True)
class VllmRun:
    """What is asked of vLLM.

    Attributes:
        draft: a drafter's folder, or ``None`` for the target alone.
        prompts: token ids.
        proposals: ``num_speculative_tokens``.
        concurrency: requests in flight at most; another is sent as soon as one has ended.
        eager: without CUDA graphs and compilation.
        record: keep every block that a rollout is handed, and the tokens it gives; needs ``eager``,
            since a graph's replay calls nothing.
        repeats: timed runs after one that warms up; 0 times the first run itself.
        speculative: further fields of vLLM's ``speculative_config``.
        engine: further arguments of ``vllm.LLM``.
        sampling: further fields of ``vllm.SamplingParams``.
        compare: other answers to the same prompts, by name. Where one first differs from this
            run's, the engine is asked for its log-probabilities, given the text up to there.
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
    compare: Mapping[str, Answers] = field(default_factory=dict)


@dataclass(frozen=True)
class VllmAnswer:
    """What came of it.

    Attributes:
        tokens: generated ids by prompt. logprobs: by prompt and token, ``{id: log-probability}``,
            where they were asked for.
        seconds: of each timed run. drafts, accepted: blocks verified and proposals accepted in all
            timed runs.
        blocks: ``hidden [B, L, H]``, ``bonus [B]`` and ``tokens [B, L - 1]`` of each call recorded.
        full_steps: seconds between two steps in a row in which all requests in flight, as many as
            may be, gained tokens: no prefill and no tail is in them.
        differences: by the name of each of ``compare``.
    """

    version: str
    tokens: list[list[int]]
    logprobs: list[list[dict[int, float]]]
    seconds: list[float]
    drafts: int
    accepted: int
    blocks: list[dict[str, Tensor]]
    full_steps: list[float] = field(default_factory=list)
    differences: dict[str, list[Difference]] = field(default_factory=dict)

    @property
    def accept_length(self) -> float:
        """Tokens gained per verification, the bonus included; 0 without a drafter."""
        return 1 + self.accepted / self.drafts if self.drafts else 0.0

    @property
    def kept_length(self) -> float:
        """Tokens of the answers per verification; 0 without a drafter.

        An answer's first token comes from its prompt's step and does not count. Knockon's engine
        counts so; vLLM's accept length also counts what it accepted past an answer's end. All timed
        runs are taken to have given as many tokens as the last.
        """
        kept = sum(len(tokens) - 1 for tokens in self.tokens if tokens)
        return kept * len(self.seconds) / self.drafts if self.drafts else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of the best run."""
        return sum(map(len, self.tokens)) / min(self.seconds)

    @property
    def step_ms(self) -> float:
        """Median of the full steps, in milliseconds; 0 where there was none."""
        return 1e3 * median(self.full_steps) if self.full_steps else 0.0


def run_vllm(
    run: VllmRun, folder: Path, environment: Mapping[str, str] | None = None
) -> VllmAnswer:
    """Start a process that does ``run``; files go to ``folder``.

    Args:
        environment: variables set for it besides this process's own.

    Raises:
        KnockonError: it failed; the message ends with what it printed.
    """
    return run_together([run], folder, environment)[0]


def run_together(
    runs: Sequence[VllmRun], folder: Path, environment: Mapping[str, str] | None = None
) -> list[VllmAnswer]:
    """:func:`run_vllm` for runs that one engine can do, in their order.

    Raises:
        Refused: two of them ask for different engines.
    """
    for run in runs[1:]:
        for name in OF_THE_ENGINE:
            theirs, first = getattr(run, name), getattr(runs[0], name)
            if theirs != first:
                raise Refused(f"{name} of a run that shares an engine", theirs, repr(first))
    folder.mkdir(parents=True, exist_ok=True)
    asked, answer = folder / "request.json", folder / "answer.pt"
    asked.write_text(json.dumps([asdict(run) for run in runs]))
    source = str(Path(__file__).parents[3])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | dict(environment or {})
    command = [sys.executable, "-m", "knockon.bench.vllm.run", str(asked), str(answer)]
    log = folder / "log.txt"
    with log.open("w") as printed:  # a file, so that it can be read where a time limit ends this
        done = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, env=variables)
    if done.returncode:
        raise KnockonError(f"vLLM failed: {log.read_text(errors='replace')[-4000:]}")
    found: list[VllmAnswer] = torch.load(answer, weights_only=False)
    return found


if __name__ == "__main__":
    # By its importable name, so that the answers can be read by another program.
    from knockon.bench.vllm import run as module
    from knockon.bench.vllm.engine import answers

    requests = [module.VllmRun(**asked) for asked in json.loads(Path(sys.argv[1]).read_text())]
    torch.save(answers(requests), sys.argv[2])
