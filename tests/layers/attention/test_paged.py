"""The paged backend equals its plain twin: gather, mask, PyTorch's SDPA in FP32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.layers.attention import BlockPlan, PagedKV, SdpaBackend, Visibility, plan_block
from knockon.layers.attention.paged import PagedBackend, attend_kernel
from knockon.layers.attention.paged_launch import AttentionLaunch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Outputs are means of normal values, so within 4. FP32 sums differ by order and by a device's
# exponential; the others round probabilities and the output to 11 and 8 bits.
TOLERANCE = {FP32: 1e-5, FP16: 3e-3, BF16: 2.4e-2}
CAUSAL, WHOLE = Visibility(True), Visibility(False)
SMALL = AttentionLaunch(block_m=16, block_n=16, splits=1, warps=4, stages=2)


@dataclass(frozen=True)
class Case:
    """Requests that start at ``starts``, ``rows`` rows each, of which ``counts`` are real."""

    starts: tuple[int, ...]
    rows: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page_size: int = 4
    counts: tuple[int, ...] | None = None
    spare_pages: int = 2
    table: torch.dtype = torch.int64

    @property
    def longest(self) -> int:
        return max(self.starts) + self.rows


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    kv: PagedKV
    plan: BlockPlan


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Views into a fused projection, a context in shuffled pages, garbage in all other slots."""
    rng = torch.Generator().manual_seed(sum(case.starts) + case.rows)
    batch, width = len(case.starts), -(-case.longest // case.page_size) + case.spare_pages
    shuffled = torch.randperm(batch * width, generator=rng) + 1
    page_table = shuffled.view(batch, width).to(device, case.table)
    slots = (batch * width + 1) * case.page_size
    kv = PagedKV.allocate(slots, case.kv_heads, case.dim, dtype, device)
    for pages in kv:
        pages.copy_(torch.randn(pages.shape, generator=rng))
    queries, keys = case.heads, case.kv_heads
    fused = torch.randn((batch, case.rows, queries + 2 * keys, case.dim), generator=rng)
    fused = fused.to(device, dtype)
    q, k, v = fused.split_with_sizes((queries, keys, keys), 2)
    counts = None if case.counts is None else torch.tensor(case.counts, device=device)
    starts = torch.tensor(case.starts, device=device)
    plan = plan_block(page_table, case.page_size, starts, case.rows, case.longest, counts=counts)
    return Inputs(q, k, v, kv, plan)


def exact(inputs: Inputs, visibility: Visibility) -> Tensor:
    """The twin's answer in FP32 on the CPU, from a copy of the same pages."""
    kv = PagedKV(*(pages.float().cpu() for pages in inputs.kv))
    plan = inputs.plan
    plan = BlockPlan(
        plan.positions.cpu(),
        plan.slots.cpu(),
        plan.page_table.cpu().long(),
        plan.page_size,
        plan.segments,
    )
    backend = SdpaBackend()
    backend.write(inputs.k.float().cpu(), inputs.v.float().cpu(), kv, plan)
    return backend.attend(inputs.q.float().cpu().contiguous(), kv, plan, visibility)


def check(
    case: Case,
    visibility: Visibility,
    dtype: torch.dtype,
    device: torch.device,
    launches: Sequence[AttentionLaunch | None] = (None,),
) -> None:
    inputs = make_inputs(case, dtype, device)
    wanted = exact(inputs, visibility)
    PagedBackend().write(inputs.k, inputs.v, inputs.kv, inputs.plan)
    # The bound that the twin reads is of no use to the kernels.
    plan = replace(inputs.plan, segments=())
    for launch in launches:
        if launch is None:
            got = PagedBackend().attend(inputs.q, inputs.kv, plan, visibility)
        else:
            got = attend_kernel(inputs.q, inputs.kv, plan, visibility, launch)
        assert got.is_contiguous() and got.dtype == dtype and got.shape == wanted.shape
        assert got.isfinite().all()
        for request in range(len(case.starts)):
            count = case.rows if case.counts is None else case.counts[request]
            torch.testing.assert_close(
                got[request, :count].float().cpu(),
                wanted[request, :count],
                atol=TOLERANCE[dtype],
                rtol=0,
            )


def splits(*numbers: int) -> list[AttentionLaunch]:
    return [replace(SMALL, splits=number) for number in numbers]


CASES = {
    "one row each": Case((0, 5, 37), 1),
    "a first row alone": Case((0,), 1, spare_pages=0),
    "verify": Case((0, 21, 14), 5),
    "a group of three": Case((9, 20), 3, heads=9, kv_heads=3),
    "one KV head": Case((9, 20), 3, heads=6, kv_heads=1),
    "no groups": Case((9, 20), 3, heads=3, kv_heads=3),
    "pages of one position": Case((3, 18), 4, page_size=1),
    "pages of many": Case((3, 30), 4, page_size=16),
    "pages of an odd size": Case((3, 30), 4, page_size=7),
    "a padded head": Case((3, 18), 2, dim=48),
    "an int32 table": Case((3, 18), 2, table=torch.int32),
}
SEEING = {
    "causal": CAUSAL,
    "whole": WHOLE,
    "window": Visibility(True, 6),
    "window of one": Visibility(True, 1),
    "whole, window": Visibility(False, 6),
    "window over blocks": Visibility(True, 19),
    "all but the first": Visibility(True, first=1),
    "from within a block": Visibility(True, first=17),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seeing", ["causal", "whole"])
def test_equals_the_twin(name: str, seeing: str, kernel_device: torch.device) -> None:
    check(CASES[name], SEEING[seeing], FP32, kernel_device, [None, *splits(3)])


@pytest.mark.parametrize("seeing", SEEING)
def test_every_visibility(seeing: str, kernel_device: torch.device) -> None:
    case = Case((0, 15, 43), 7)
    check(case, SEEING[seeing], FP32, kernel_device, [None, *splits(1, 2)])


@pytest.mark.parametrize("start", [0, 14, 15, 16, 31, 47])
def test_contexts_across_blocks_and_parts(start: int, kernel_device: torch.device) -> None:
    check(Case((start,), 2), CAUSAL, FP32, kernel_device, splits(1, 3, 8))


def test_half_precision(kernel_device: torch.device) -> None:
    check(Case((0, 40), 5), CAUSAL, FP16, kernel_device, [None, *splits(1, 3)])


def test_rows_of_several_tiles(kernel_device: torch.device) -> None:
    case = Case((3, 20), 19)
    for seeing in ("causal", "whole", "window"):
        check(case, SEEING[seeing], FP32, kernel_device, splits(1, 2))


def test_ragged_prefill(kernel_device: torch.device) -> None:
    case = Case((0, 8, 2), 18, counts=(18, 3, 10))
    for seeing in ("causal", "window"):
        check(case, SEEING[seeing], FP32, kernel_device, [None, *splits(2)])


def test_rows_past_the_table_stay_finite(kernel_device: torch.device) -> None:
    inputs = make_inputs(Case((6, 2), 2, spare_pages=0), FP32, kernel_device)
    starts = torch.tensor((7, 400), device=kernel_device)
    plan = plan_block(inputs.plan.page_table, 4, starts, 2)
    for visibility in (CAUSAL, Visibility(True, 5)):
        for launch in splits(1, 2):
            got = attend_kernel(inputs.q, inputs.kv, plan, visibility, launch)
            assert got.isfinite().all()


def test_a_row_rounds_alike_in_any_batch(kernel_device: torch.device) -> None:
    inputs = make_inputs(Case((30, 9), 3), FP32, kernel_device)
    PagedBackend().write(inputs.k, inputs.v, inputs.kv, inputs.plan)
    both = attend_kernel(inputs.q, inputs.kv, inputs.plan, CAUSAL, SMALL)
    starts = torch.tensor((30,), device=kernel_device)
    plan = plan_block(inputs.plan.page_table[:1], 4, starts, 3)
    assert torch.equal(attend_kernel(inputs.q[:1], inputs.kv, plan, CAUSAL, SMALL), both[:1])


def test_write_fills_the_slots_and_no_others(kernel_device: torch.device) -> None:
    inputs = make_inputs(Case((2, 11), 3, heads=6, kv_heads=3, dim=48), FP32, kernel_device)
    wanted = PagedKV(*(pages.clone() for pages in inputs.kv))
    SdpaBackend().write(inputs.k, inputs.v, wanted, inputs.plan)
    PagedBackend().write(inputs.k, inputs.v, inputs.kv, inputs.plan)
    for got, want in zip(inputs.kv, wanted, strict=True):
        assert torch.equal(got, want)


def test_heads_too_large_are_refused(kernel_device: torch.device) -> None:
    inputs = make_inputs(Case((2,), 1, dim=272), FP32, kernel_device)
    with pytest.raises(Refused, match="at most 256"):
        PagedBackend().attend(inputs.q, inputs.kv, inputs.plan, CAUSAL)


SERVED = {
    "8B, one block": Case((760,), 16, heads=32, kv_heads=8, dim=128, page_size=16),
    "8B, one row": Case((5000,), 1, heads=32, kv_heads=8, dim=128, page_size=16),
    "8B, 32 blocks": Case(tuple(range(0, 320, 10)), 16, 32, 8, 128, 16, table=torch.int32),
    "SmolLM2, 64 rows": Case(tuple(range(100, 356, 4)), 1, 9, 3, 64, 16),
    "SmolLM2, a rank of two": Case((77, 300), 16, 6, 2, 64, 1),
    "large heads": Case((77, 300), 16, 8, 2, 256, 16),
    "large groups": Case((77, 300), 16, 32, 2, 128, 16),
    "odd heads": Case((77, 300), 16, 10, 2, 80, 16),
    "one prompt": Case((0,), 700, heads=8, kv_heads=2, dim=128, page_size=16),
    "ragged prompts": Case((0, 64, 7), 300, 9, 3, 64, 16, counts=(300, 17, 256)),
    "many prompts": Case((0, 64) * 4, 128, heads=32, kv_heads=8, dim=128, page_size=16),
    "a large prompt": Case((512,), 600, heads=8, kv_heads=2, dim=256, page_size=16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVED)
def test_served_sizes(name: str) -> None:
    check(SERVED[name], CAUSAL, BF16, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["8B, one block", "large heads", "ragged prompts"])
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_served_sizes_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    check(SERVED[name], CAUSAL, dtype, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["8B, one block", "SmolLM2, a rank of two", "one prompt"])
@pytest.mark.parametrize("seeing", ["whole", "window over blocks"])
def test_served_sizes_under_other_visibility(name: str, seeing: str) -> None:
    launches = [None, *(AttentionLaunch(64, 32, number, 4, 2) for number in (1, 5))]
    check(SERVED[name], SEEING[seeing], BF16, torch.device("cuda"), launches)


@pytest.mark.gpu
def test_a_captured_launch_serves_other_lengths() -> None:
    device = torch.device("cuda")
    case = Case((3, 300), 4, heads=8, kv_heads=2, dim=64, page_size=16)
    inputs = make_inputs(case, BF16, device)
    backend = PagedBackend()
    plan = replace(inputs.plan, segments=())

    def run() -> Tensor:
        backend.write(inputs.k, inputs.v, inputs.kv, plan)
        return backend.attend(inputs.q, inputs.kv, plan, CAUSAL)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for starts in ((3, 300), (0, 17), (250, 1)):
        moved = plan_block(plan.page_table, 16, torch.tensor(starts, device=device), 4, 304)
        plan.positions.copy_(moved.positions)
        plan.slots.copy_(moved.slots)
        graph.replay()
        wanted = exact(replace(inputs, plan=moved), CAUSAL)
        torch.testing.assert_close(out.float().cpu(), wanted, atol=TOLERANCE[BF16], rtol=0)
