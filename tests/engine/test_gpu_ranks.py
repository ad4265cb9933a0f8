"""The engine on several GPUs: collectives inside the graphs, the same tokens as on one CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.generation import (
    DRAFTERS,
    GREEDY,
    TinyShelf,
    check_same,
    generate,
    random_prompts,
)
from tests.engine.test_pipelined import SAMPLED, with_seed
from tests.tiny_models import TinyTarget

PROMPTS = random_prompts(12, high=150)
CUDA = {"device": "cuda", "kv_memory": 128 << 20, "max_batch_size": 8}


def on(count: int) -> Any:
    """A case for so many GPUs."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    lacking = pytest.mark.skipif(there < count, reason=f"needs {count} GPUs")
    return pytest.param(count, id=f"ranks{count}", marks=[pytest.mark.gpu, lacking])


RANKS = [on(2), on(4), on(8)]


def run(tiny: TinyShelf, draft: str | None, params: Any, **how: Any) -> Any:
    target = TinyTarget(kv_heads=9)  # dealt unevenly to 2, 4 and 8 ranks
    recipe = replace(DRAFTERS[draft], kv_heads=9) if draft else None
    drafter = tiny.drafter(recipe, target) if recipe else None
    return generate(tiny.target(target), drafter, PROMPTS, params, **how)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("draft", "width"), ((None, 1), ("dflash", 8), ("domino", 8), ("domino", "auto"))
)
def test_graphs_on_ranks_equal_a_cpu(
    tiny: TinyShelf, draft: str | None, width: int | str, ranks: int
) -> None:
    params = [replace(GREEDY, max_tokens=20 + 3 * i) for i in range(len(PROMPTS))]
    wide = {"verify_width": width} if draft else {}
    cpu = run(tiny, draft, params, device="cpu", **({"verify_width": 8} if draft else {}))
    got = run(tiny, draft, params, tp_size=ranks, **wide, **CUDA)
    if width == "auto":  # chosen by measured times, so accept lengths differ from run to run
        assert [output.token_ids for output in cpu] == [output.token_ids for output in got]
    else:
        check_same(cpu, got)


@pytest.mark.parametrize("ranks", RANKS)
def test_seeded_draws_and_preemption_on_ranks(tiny: TinyShelf, ranks: int) -> None:
    params = [with_seed(SAMPLED, seed) for seed in range(len(PROMPTS))]
    params[3] = replace(params[3], repetition_penalty=1.2)
    params[4] = replace(params[4], logprobs=2)
    cpu = run(tiny, None, params, device="cpu")
    heads = -(-9 // ranks)  # of the rank that has the most
    tight = CUDA | {"kv_memory": ranks * heads * (210 << 10), "page_size": 4}
    got = run(tiny, "domino", params, tp_size=ranks, verify_width=8, **tight)
    assert sum(output.metrics.preemptions for output in got) > 0
    assert [output.token_ids for output in cpu] == [output.token_ids for output in got]


@pytest.mark.parametrize("ranks", [on(2)])
@pytest.mark.parametrize("draft", ["dflash", "domino"])
def test_recurrent_layers_on_ranks(tiny: TinyShelf, draft: str, ranks: int) -> None:
    """Accept lengths that one rank decides are what every rank's states are moved on by."""
    target = TinyTarget("qwen3_5")
    model, drafter = tiny.target(target), tiny.drafter(draft, target)
    params = [replace(GREEDY, max_tokens=20 + 3 * i) for i in range(len(PROMPTS))]
    cpu = generate(model, drafter, PROMPTS, params, device="cpu", verify_width=8)
    got = generate(model, drafter, PROMPTS, params, tp_size=ranks, verify_width=8, **CUDA)
    check_same(cpu, got)
