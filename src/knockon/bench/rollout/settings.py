"""What a run of the benchmark is asked for, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

from knockon.bench.rollout.shapes import RolloutShape, find_shape
from knockon.bench.rollout.variants import HEADS, IMPLEMENTATIONS, STAGES, Variant, variants_of
from knockon.errors import Refused
from knockon.rollout.fp8_head import MULTIPLE, fp8_obstacle

DTYPES = ("bfloat16", "float16", "float32", "float64")
ROUNDS = {"cuda": 5, "cpu": 3}
REPLAYS = {"cuda": 100, "cpu": 5}
LEAST_INPUTS = 3


@dataclass(frozen=True)
class RolloutSettings:
    """One run, complete and consistent. :func:`settle` makes it from what a user gives.

    Attributes:
        tp_size: ranks that take part.
        one_rank_of: time one rank's work of that many, its collectives replaced by local copies.
        steps: proposals a block.
        check_proposals: proposal ids to compare per variant, at least, over all batches.
    """

    shape: RolloutShape
    device: str
    dtype: str
    tp_size: int
    one_rank_of: int | None
    batches: tuple[int, ...]
    variants: tuple[Variant, ...]
    pool_size: int
    steps: int
    rounds: int
    replays: int
    check_proposals: int
    seed: int

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def vocab_ranks(self) -> int:
        """Ranks that the vocabulary is dealt to."""
        return self.one_rank_of or self.tp_size

    @property
    def check_inputs(self) -> int:
        """Fresh random inputs a batch on which proposals are compared."""
        return max(LEAST_INPUTS, ceil(self.check_proposals / (sum(self.batches) * self.steps)))


def settle(
    *,
    shape: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    tp_size: int = 1,
    one_rank_of: int | None = None,
    batches: Sequence[int] = (1, 8, 64),
    stages: Sequence[str] = tuple(STAGES),
    implementations: Sequence[str] | None = None,
    pool_size: int = 2048,
    steps: int | None = None,
    rounds: int | None = None,
    replays: int | None = None,
    check_proposals: int = 1095,
    seed: int = 0,
    draft_head_dtype: str = HEADS[0],
) -> RolloutSettings:
    """Fill in what depends on the device, and check everything.

    Args:
        shape: a name or a path; by default ``qwen3.6-27b`` on CUDA and ``tiny`` on a CPU.
        dtype: ``"auto"`` is ``bfloat16`` on CUDA and ``float32`` on a CPU.
        implementations: by default all that run on the device in the dtype.
        steps: by default ``L - 1``.
        draft_head_dtype: ``"fp8"`` adds base and C with an FP8 copy of the LM head.

    Raises:
        Refused: a value outside what is accepted, naming the field.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise Refused("device", device, "auto, cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("device", device, "cpu; torch sees no CUDA device here")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = find_shape(shape or ("qwen3.6-27b" if device == "cuda" else "tiny"))
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    if dtype not in DTYPES:
        raise Refused("dtype", dtype, f"auto, {', '.join(DTYPES)}")
    steps = found.block_size - 1 if steps is None else steps
    if not 1 <= steps <= found.max_steps:
        raise Refused("steps", steps, f"1 to {found.max_steps}, the rows of shape {found.name}")
    _each_once("stages", stages, tuple(STAGES))
    possible = IMPLEMENTATIONS if device == "cuda" and dtype != "float64" else ("plain",)
    implementations = possible if implementations is None else implementations
    if "fused" in implementations and "fused" not in possible:
        where = "on a CPU" if device == "cpu" else "in float64"
        raise Refused("implementation", "fused", f"plain {where}", "The kernels need a CUDA GPU")
    _each_once("implementation", implementations, possible)
    if not batches or min(batches) < 1 or len(set(batches)) < len(batches):
        raise Refused("batches", list(batches), "different batch sizes of at least 1")
    if {"B", "C"} & set(stages) and not 0 < pool_size < found.vocab_size:
        raise Refused(
            "pool_size",
            pool_size,
            f"1 to V - 1 = {found.vocab_size - 1} for stages B and C; stage A is K = 0",
        )
    if one_rank_of is not None:
        _at_least("one_rank_of", one_rank_of, 2)
        if tp_size != 1:
            raise Refused("tp_size", tp_size, "1 with --one-rank-of, which is a single process")
    if draft_head_dtype not in HEADS:
        raise Refused("draft_head_dtype", draft_head_dtype, f"one of {', '.join(HEADS)}")
    if draft_head_dtype == "fp8":
        _refuse_fp8(found, device, dtype, stages)
    for field, ranks in (("one_rank_of", one_rank_of or 1), ("tp_size", tp_size)):
        if ranks > found.vocab_size:
            raise Refused(field, ranks, f"at most V = {found.vocab_size}")
    if not 0 <= seed < 1 << 63:
        raise Refused("seed", seed, "0 to 2**63 - 1")
    return RolloutSettings(
        shape=found,
        device=device,
        dtype=dtype,
        tp_size=_at_least("tp_size", tp_size, 1),
        one_rank_of=one_rank_of,
        batches=tuple(batches),
        variants=variants_of(stages, implementations, draft_head_dtype),
        pool_size=pool_size,
        steps=steps,
        rounds=_at_least("rounds", ROUNDS[device] if rounds is None else rounds, 1),
        replays=_at_least("replays", REPLAYS[device] if replays is None else replays, 1),
        check_proposals=_at_least("check_proposals", check_proposals, 1),
        seed=seed,
    )


def _refuse_fp8(shape: RolloutShape, device: str, dtype: str, stages: Sequence[str]) -> None:
    obstacle = fp8_obstacle(torch.device(device))
    if not {"base", "C"} & set(stages):
        obstacle = f"it is timed in stages base and C; stages are {','.join(stages)}"
    elif dtype == "float64":
        obstacle = "dtype is float64"
    elif shape.hidden_size % MULTIPLE:
        obstacle = f"H = {shape.hidden_size} is no multiple of {MULTIPLE}"
    if obstacle:
        raise Refused("draft_head_dtype", "fp8", "auto here", obstacle)


def _each_once(field: str, found: Sequence[str], known: Sequence[str]) -> None:
    if not found or not set(found) <= set(known) or len(set(found)) < len(found):
        raise Refused(field, ",".join(found), f"each at most once: {', '.join(known)}")


def _at_least(field: str, value: int, low: int) -> int:
    if value < low:
        raise Refused(field, value, f"at least {low}")
    return value
