"""The engine on a GPU: graphs equal eager steps equal the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from knockon.engine.request import RequestOutput
from tests.engine.generation import GREEDY, TinyShelf, check_same, generate, random_prompts
from tests.engine.test_pipelined import SAMPLED, with_seed
from tests.tiny_models import TinyTarget

pytestmark = pytest.mark.gpu
PROMPTS = random_prompts(20, high=200)
CUDA = {"device": "cuda", "kv_memory": 64 << 20, "max_batch_size": 8}
GRAPHS = CUDA
EAGER = CUDA | {"cuda_graph": False}
PLAIN = CUDA | {"attention_backend": "torch", "overlap_schedule": False}


def run(tiny: TinyShelf, draft: str | None, params: Any, family: str, **how: Any) -> Any:
    target = TinyTarget(family)
    drafter = tiny.drafter(draft, target) if draft else None
    if draft:
        how = {"verify_width": 16} | how
    return generate(tiny.target(target), drafter, PROMPTS, params, **how)


@pytest.mark.parametrize("draft", (None, "dflash", "domino", "domino-shifted", "mtp"))
@pytest.mark.parametrize("family", ("llama", "qwen3"))
def test_graphs_equal_eager_equal_a_cpu(tiny: TinyShelf, draft: str | None, family: str) -> None:
    params = [replace(GREEDY, max_tokens=20 + 3 * i) for i in range(len(PROMPTS))]
    cpu = run(tiny, draft, params, family, device="cpu")
    for how in (GRAPHS, EAGER, PLAIN):
        check_same(cpu, run(tiny, draft, params, family, **how))


@pytest.mark.parametrize("draft", ("domino", "mtp"))
@pytest.mark.parametrize("width", (2, 8, 16))
def test_seeded_draws_equal_a_cpu_at_every_width(tiny: TinyShelf, draft: str, width: int) -> None:
    params = [with_seed(SAMPLED, seed) for seed in range(len(PROMPTS))]
    params[3] = replace(params[3], repetition_penalty=1.2)
    params[4] = replace(params[4], logprobs=2)
    cpu = run(tiny, None, params, "llama", device="cpu")
    got = run(tiny, draft, params, "llama", verify_width=width, **GRAPHS)
    assert [output.token_ids for output in cpu] == [output.token_ids for output in got]


@pytest.mark.parametrize("draft", ("domino", "mtp"))
def test_speculation_off_and_batches_beyond_the_largest_graph(tiny: TinyShelf, draft: str) -> None:
    params = [with_seed(SAMPLED, seed) if seed % 2 else GREEDY for seed in range(len(PROMPTS))]
    params = [replace(each, speculation=i % 3 != 0) for i, each in enumerate(params)]
    cpu = run(tiny, draft, params, "llama", device="cpu")
    for how in ({}, {"cuda_graph_max_bs": 3}):
        check_same(cpu, run(tiny, draft, params, "llama", **GRAPHS, **how))
    assert set(cpu[0].metrics.accept_lengths) == {1}


@pytest.mark.parametrize("draft", ("domino", "mtp"))
def test_preemption_and_prefix_hits(tiny: TinyShelf, draft: str) -> None:
    small = GRAPHS | {"kv_memory": 2 << 20, "page_size": 4}
    wide: list[RequestOutput] = run(tiny, draft, GREEDY, "llama", **GRAPHS)
    tight: list[RequestOutput] = run(tiny, draft, GREEDY, "llama", **small)
    assert sum(output.metrics.preemptions for output in tight) > 0
    check_same(wide, tight)


def test_memory_is_sized_from_what_is_free(tiny: TinyShelf) -> None:
    how = GRAPHS | {"kv_memory": None, "mem_fraction_static": 0.3, "max_batch_size": 4}
    check_same(
        run(tiny, "domino", GREEDY, "llama", **GRAPHS), run(tiny, "domino", GREEDY, "llama", **how)
    )


def test_keys_and_values_in_fp8(tiny: TinyShelf) -> None:
    """Batches of other shapes round otherwise, and what lies between two FP8 numbers may flip."""
    fp8 = {"kv_cache_dtype": "fp8_e4m3"}
    alone = run(tiny, None, GREEDY, "llama", **PLAIN, **fp8)
    for draft in (None, "domino"):
        for how in (GRAPHS, EAGER):
            found = run(tiny, draft, GREEDY, "llama", **how, **fp8)
            same = [a.token_ids == b.token_ids for a, b in zip(alone, found, strict=True)]
            assert sum(same) >= 0.9 * len(same)
