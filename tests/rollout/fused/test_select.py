"""The selection kernels equal their plain twin, and the twin equals a plain sort."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.rollout.fused.keys import SENTINEL
from knockon.rollout.fused.select import MOST_ROWS, select, select_kernel
from knockon.rollout.fused.select_launch import SelectLaunch, select_launch
from knockon.rollout.fused.select_plain import select_plain
from knockon.rollout.fused.selected import Selected
from knockon.rollout.reference import best, candidate_pool
from tests.rollout.fused.hard_logits import HARD

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def logits_of(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    rng = torch.Generator(device).manual_seed(sum(shape))
    return HARD[kind](shape, rng).to(dtype)


def assert_same(got: Selected, wanted: Selected) -> None:
    for name, one, other in zip(Selected._fields, got, wanted, strict=True):
        assert one.dtype == torch.int32, name
        assert torch.equal(one, other), name


def check(
    local: Tensor,
    num_org: int,
    prefix: int,
    k: int,
    start: int = 7,
    launch: SelectLaunch | None = None,
) -> Selected:
    counts = torch.full((2,), 5, dtype=torch.int64, device=local.device)
    got = select_kernel(local, num_org, start, prefix, k, counts[0], launch)
    wanted = select_plain(local, num_org, start, prefix, k, counts[1])
    assert_same(got, wanted)
    assert counts[0] == counts[1]
    return got


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize(
    ("dtype", "shape", "num_org", "prefix", "k"),
    [
        (BF16, (4, 2, 300), 300, 1, 40),
        (FP32, (3, 1, 200), 190, 1, 64),
    ],
)
def test_hard_logits(
    kind: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    num_org: int,
    prefix: int,
    k: int,
    kernel_device: torch.device,
) -> None:
    check(logits_of(kind, shape, dtype, kernel_device), num_org, prefix, k)


@pytest.mark.parametrize(
    ("dtype", "shape", "num_org", "prefix", "k"),
    [
        (FP16, (5, 3, 257), 250, 2, 33),  # two prefix rows, a width that no vector divides
        (BF16, (2, 2, 64), 0, 1, 16),  # an empty shard
        (FP32, (2, 2, 64), 0, 1, 16),
        (BF16, (2, 2, 70), 33, 1, 50),  # more offers than ids: sentinels
        (FP16, (3, 1, 48), 48, 0, 48),  # K = N
        (FP32, (3, 1, 48), 40, 0, 100),  # K > N
        (BF16, (2, 1, 64), 64, 1, 40),  # more offers than groups, none of them padding
        (BF16, (2, 2, 100), 99, 2, 10),  # no corrected row
        (BF16, (2, 1, 1), 1, 1, 5),  # one id
        (BF16, (1, 2, 40), 40, 0, 1),  # a pool of one
        (BF16, (3, 1, 2500), 2497, 1, 5),  # several blocks
    ],
)
def test_sizes_at_the_edges(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    num_org: int,
    prefix: int,
    k: int,
    kernel_device: torch.device,
) -> None:
    for kind in ("normal", "special"):
        check(logits_of(kind, shape, dtype, kernel_device), num_org, prefix, k)


def test_padding_is_never_read_as_a_number(kernel_device: torch.device) -> None:
    local = logits_of("normal", (3, 2, 100), BF16, kernel_device)
    local[..., 90:] = math.inf
    local[0, :, 95] = math.nan
    got = check(local, 90, 1, 95)
    assert (got.pool_keys == SENTINEL).sum(-1).tolist() == [5, 5]
    assert got.pool_ids[:, -5:].tolist() == [[97, 98, 99, 100, 101]] * 2


@pytest.mark.parametrize("kind", ["clustered", "all_equal", "few_values"])
def test_lists_too_long_for_registers_are_streamed(kind: str, kernel_device: torch.device) -> None:
    launch = SelectLaunch(64, 1, 16, 2, 1, 1, 8, 1)
    check(logits_of(kind, (2, 2, 200), BF16, kernel_device), 200, 1, 24, launch=launch)


@pytest.mark.parametrize(
    "launch",
    [
        SelectLaunch(128, 1, 64, 2, 2, 1, 64, 1),  # a group of two words, a slice read whole
        SelectLaunch(128, 1, 64, 1, 1, 1, 64, 1),  # and not whole
    ],
)
def test_groups_of_more_ids_than_bits(launch: SelectLaunch, kernel_device: torch.device) -> None:
    check(logits_of("few_values", (2, 1, 250), FP32, kernel_device), 249, 1, 3, launch=launch)


def test_the_twin_is_a_plain_sort(kernel_device: torch.device) -> None:
    for kind in HARD:
        local = logits_of(kind, (4, 3, 61), BF16, torch.device("cpu"))
        got = select_plain(local, 59, 100, 1, 17, torch.zeros((), dtype=torch.int64))
        for b in range(3):
            rows = local[:, b, :59].float().tolist()
            assert got.prefix_ids[b].tolist() == [100 + best(rows[0], list(range(59)))]
            assert got.pool_ids[b].tolist() == [100 + v for v in candidate_pool(rows[1:], 17)]


def test_rows_of_a_larger_tensor_are_taken_in_place(kernel_device: torch.device) -> None:
    whole = logits_of("normal", (3, 5, 96), FP32, kernel_device)
    check(whole[:, 1:3, :80], 80, 1, 20)


def test_more_rows_than_the_kernels_take(kernel_device: torch.device) -> None:
    local = torch.zeros((MOST_ROWS + 1, 1, 8), device=kernel_device)
    nan_rows = torch.zeros((), dtype=torch.int64, device=kernel_device)
    with pytest.raises(Refused, match="rows"):
        select_kernel(local, 8, 0, 1, 4, nan_rows)
    assert select(local, 8, 0, 1, 4, nan_rows).pool_ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_published_sizes(kind: str, batch: int, kernel_device: torch.device) -> None:
    check(logits_of(kind, (15, batch, 248320), BF16, kernel_device), 248320, 1, 2048)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize(
    ("dtype", "batch", "width", "num_org", "k"),
    [
        (FP32, 8, 124160, 124160, 2048),
        (FP16, 3, 151936, 151936, 2048),
        (BF16, 5, 82774, 82772, 2048),  # a third of a vocabulary: rows not aligned
        (BF16, 2, 31040, 31033, 512),
        (FP32, 2, 31040, 0, 2048),
        (BF16, 2, 31040, 1000, 2048),
        (BF16, 1, 20000, 20000, 15000),
    ],
)
def test_other_large_sizes(
    kind: str,
    dtype: torch.dtype,
    batch: int,
    width: int,
    num_org: int,
    k: int,
    kernel_device: torch.device,
) -> None:
    check(logits_of(kind, (15, batch, width), dtype, kernel_device), num_org, 1, k)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
def test_a_captured_graph_stays_right_on_new_logits(
    batch: int, kernel_device: torch.device
) -> None:
    local = logits_of("normal", (15, batch, 124160), BF16, kernel_device)
    nan_rows = torch.zeros((), dtype=torch.int64, device=kernel_device)
    select(local, 124160, 0, 1, 2048, nan_rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = select(local, 124160, 0, 1, 2048, nan_rows)
    for kind in HARD:
        local.copy_(logits_of(kind, tuple(local.shape), BF16, kernel_device))
        nan_rows.zero_()
        graph.replay()
        expected_nan = torch.zeros_like(nan_rows)
        assert_same(captured, select_plain(local, 124160, 0, 1, 2048, expected_nan))
        assert nan_rows == expected_nan


@pytest.mark.parametrize("width", [1, 63, 4096, 31040, 124160, 151936, 248320, 262144, 1000000])
@pytest.mark.parametrize("batch", [1, 8, 64, 200])
def test_launch_settings_keep_the_kernels_bounds(width: int, batch: int) -> None:
    for k in (1, 512, 2048, 30000):
        launch = select_launch(batch, width, k)
        chunks = -(-width // launch.block)
        assert chunks * launch.block // launch.group <= 8192
        assert launch.block % launch.group == 0
        assert launch.parts <= launch.best_tile <= 16384
        sizes = (launch.block, launch.group, launch.parts, launch.list_tile, launch.best_tile)
        assert all(n & (n - 1) == 0 for n in sizes)
