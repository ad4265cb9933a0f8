"""The FP8 head gives the logits that its codes and scales stand for, and a rollout takes them."""

from __future__ import annotations

import pytest
import torch

from knockon.errors import Refused
from knockon.parallel import SingleRank, VocabShard
from knockon.rollout import DominoHead, DominoRollout, FP8Head
from knockon.rollout import fp8_head as module
from knockon.rollout.reference import reference_rollout

V, H, G, E, L = 37, 32, 8, 8, 6


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=rng) * shape[-1] ** -0.5).to(dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("rows", (1, 37, 48))
def test_logits_are_those_of_codes_times_scales(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROWS_AT_A_TIME", 16)
    weight, x = normal(0, rows, H, dtype=dtype), normal(1, 5, H, dtype=dtype)
    head = FP8Head(weight)
    logits = head(x)
    assert logits.shape == (5, rows) and logits.dtype == dtype and logits.is_contiguous()
    codes, scales = module.quantise_rows_plain(x)
    held = head.codes.double() * head.scales.double().t()
    exact = (codes.double() * scales.double()) @ held[:rows].t()
    torch.testing.assert_close(logits.double(), exact, rtol=2**-8, atol=1e-6)
    assert head.num_bytes == -(-rows // 16) * 16 * (H + 4)


def test_logits_are_off_by_no_more_than_the_codes_are() -> None:
    weight, x = normal(2, 500, 256), normal(3, 40, 256)
    logits, exact = FP8Head(weight)(x), x @ weight.t()
    off = (logits - exact).abs()
    # Each factor by a 16th, or by 2^-10 of its row's scale, which is below the 16th on average.
    assert (off <= (2 * 2**-4 + 2**-8) * (x.abs() @ weight.abs().t())).all()
    assert off.square().mean().sqrt() < 0.05 * exact.std()


def test_any_leading_shape_is_taken() -> None:
    head, x = FP8Head(normal(4, V, H)), normal(5, 2, 3, H)
    assert torch.equal(head(x), head(x.view(6, H)).view(2, 3, V))
    assert head(x[:0]).shape == (0, 3, V)


@pytest.mark.parametrize(
    ("weight", "field"),
    (
        (torch.zeros(4, 24), "shape"),
        (torch.zeros(0, 16), "shape"),
        (torch.zeros(16), "shape"),
        (torch.zeros(4, 16, dtype=torch.float64), "dtype"),
        (torch.zeros(4, 16, dtype=torch.int8), "dtype"),
        (torch.zeros(4, 16, device="meta"), "device"),
    ),
)
def test_what_fp8_cannot_hold_is_refused(weight: torch.Tensor, field: str) -> None:
    with pytest.raises(Refused, match=f"FP8 head: weight {field}|FP8 head: {field}"):
        FP8Head(weight)


def test_a_gpu_without_fp8_products_is_refused_with_its_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert "compute capability 8.0" in module.fp8_obstacle(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert module.fp8_obstacle(torch.device("cuda")) == ""


def domino_head() -> DominoHead:
    return DominoHead(
        gru_input=4 * normal(10, 3 * G, H),
        gru_state=4 * normal(11, 3 * G, G),
        correction_in=4 * normal(12, E, H + G),
        correction_out=normal(13, V, E),
        prefix_len=1,
        shift_label=False,
    )


@pytest.mark.parametrize("pool_size", (0, 9))
def test_a_rollout_from_an_fp8_head_is_the_oracle_from_its_logits(pool_size: int) -> None:
    head, embedding, weight = domino_head(), normal(14, V, H), normal(15, V, H)
    fp8 = FP8Head(weight)
    z, bonus = 4 * normal(16, 3, L, H), torch.tensor([1, 2, 36])
    shard = VocabShard.deal(V, 1, 0)
    base = fp8(z[:, 1:]).double()
    wanted = reference_rollout(
        head, embedding, None, z, bonus, L - 1, pool_size, base=base, gate_table=True
    )
    made = DominoRollout(head, embedding, fp8, shard, SingleRank(), pool_size=pool_size)
    assert torch.equal(made(z, bonus), wanted)
    own = DominoRollout(head, embedding, weight, shard, SingleRank(), pool_size=pool_size)
    other = own.with_settings(lm_head=fp8)
    assert torch.equal(other(z, bonus), wanted)
    assert other._gates is own._gates and own._logits is not fp8


@pytest.mark.parametrize(
    "weight", (normal(0, V - 1, H), normal(0, V, 2 * H), normal(0, V, H, dtype=torch.bfloat16))
)
def test_an_fp8_head_of_other_sizes_is_refused_when_the_rollout_is_made(
    weight: torch.Tensor,
) -> None:
    head, embedding, shard = domino_head(), normal(14, V, H), VocabShard.deal(V, 1, 0)
    with pytest.raises(Refused, match="lm_head"):
        DominoRollout(head, embedding, FP8Head(weight), shard, SingleRank())
    made = DominoRollout(head, embedding, embedding, shard, SingleRank())
    with pytest.raises(Refused, match="lm_head"):
        made.with_settings(lm_head=FP8Head(weight))


def test_an_fp8_head_on_another_device_is_refused_when_the_rollout_is_made() -> None:
    embedding, fp8 = normal(14, V, H), FP8Head(normal(0, V, H))
    fp8.device = torch.device("meta")
    with pytest.raises(Refused, match="lm_head device: found 'meta', wanted cpu"):
        DominoRollout(domino_head(), embedding, fp8, VocabShard.deal(V, 1, 0), SingleRank())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 7, 120, 960))
@pytest.mark.parametrize(("vocab", "hidden"), ((4096, 5120), (1000, 512), (999, 64)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_the_gpus_product_is_the_plain_one_but_for_its_sums(
    rows: int, vocab: int, hidden: int, dtype: torch.dtype
) -> None:
    """Tensor cores cut each sum of 32 products to 14 bits or so of the running sum."""
    if module.fp8_obstacle(torch.device("cuda")):
        pytest.skip("no FP8 products")
    weight = normal(20, vocab, hidden, dtype=dtype).cuda()
    x = normal(21, rows, hidden, dtype=dtype).cuda() * hidden**0.5
    head = FP8Head(weight)
    found, wanted = head(x).float(), head.plain(x).float()
    assert found.shape == (rows, vocab) and found.is_contiguous()
    sizes = x.float().abs() @ weight.float().abs().t() * (1 + 2**-3)
    off = (found - wanted).abs()
    assert (off <= 2**-7 * wanted.abs() + hidden / 32 * 2**-12 * sizes).all()
    assert off.square().mean().sqrt() <= 2**-6 * wanted.square().mean().sqrt()
