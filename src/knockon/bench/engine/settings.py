"""What a run of the benchmark is asked for, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from knockon.bench.engine.shapes import EngineShape, find_shape
from knockon.bench.engine.synthetic import SyntheticAccept
from knockon.bench.engine.variant import TARGET, Variant
from knockon.engine.config import DRAFT_HEAD_DTYPES, check_verify_width
from knockon.engine.width import AUTO
from knockon.errors import Refused
from knockon.rollout.fp8_head import MULTIPLE, fp8_obstacle

METHODS = {
    TARGET: "a token a step",
    "dflash": "DFlash: each row's own argmax",
    "domino": "Domino: the DFlash block rolled out into a chain",
}
DTYPES = ("bfloat16", "float16", "float32", "float64")
# Measured on GSM8K with blocks of 16, greedy (the request's table).
ACCEPT_LENGTHS = {"dflash": 6.878, "domino": 9.163}
PROFILED_STEPS = 20


@dataclass(frozen=True)
class EngineSettings:
    """One run, complete and consistent. :func:`settle` makes it from what a user gives.

    Attributes:
        concurrency: requests in flight, one measurement each.
        num_prompts: requests of a measurement; ``None``: twice the concurrency.
        verify_widths: each drafting method runs at every one; ``"auto"`` chooses step by step.
        accept_lengths: means of a whole verified block wanted, for each drafting method.
        narrow_accept_lengths: a narrower width and the mean there, of methods where it is given.
        pool_size: Domino's ``K``.
        draft_head_dtype: of the LM head that proposes, as ``EngineConfig`` has it.
        alternate: concurrencies of a trace that goes back and forth between two, if asked for.
        repeats: measurements; the median counts.
        profile: whether some steps are traced, after the measurements.
    """

    shape: EngineShape
    device: str
    dtype: str
    methods: tuple[str, ...]
    concurrency: tuple[int, ...]
    num_prompts: int | None
    input_len: int
    output_len: int
    verify_widths: tuple[int | str, ...]
    accept_lengths: Mapping[str, float]
    narrow_accept_lengths: Mapping[str, tuple[int, float]]
    pool_size: int
    draft_head_dtype: str
    alternate: tuple[int, int] | None
    repeats: int
    profile: bool
    seed: int

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def max_length(self) -> int:
        """Positions that a request reaches."""
        return self.input_len + self.output_len

    def prompts_at(self, concurrency: int) -> int:
        """Requests of a measurement."""
        return 2 * concurrency if self.num_prompts is None else self.num_prompts

    @property
    def max_batch_size(self) -> int:
        """Requests that the engines are made for."""
        return max((*self.concurrency, *(self.alternate or ())))

    @property
    def alternations(self) -> int:
        """How often the alternating trace goes there and back."""
        return max(2, self.repeats)

    def variants_of(self, method: str) -> tuple[Variant, ...]:
        """The method at each of its widths."""
        widths = (1,) if method == TARGET else self.verify_widths
        return tuple(Variant(method, width) for width in widths)

    def law_of(self, method: str) -> SyntheticAccept:
        """What the method has accepted, at every width."""
        narrow = self.narrow_accept_lengths.get(method)
        return SyntheticAccept(self.accept_lengths[method], self.shape.block_size, narrow)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Every row of a table."""
        return tuple(v for method in self.methods for v in self.variants_of(method))


def settle(
    *,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    methods: Sequence[str] = tuple(METHODS),
    concurrency: Sequence[int] | None = None,
    num_prompts: int | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    verify_widths: Sequence[int | str] | None = None,
    accept_lengths: Mapping[str, float] | None = None,
    narrow_accept_lengths: Mapping[str, tuple[int, float]] | None = None,
    pool_size: int = 2048,
    draft_head_dtype: str = "auto",
    alternate: tuple[int, int] | None = None,
    repeats: int | None = None,
    profile: bool = False,
    seed: int = 0,
) -> EngineSettings:
    """Fill in what depends on the device, and check everything.

    Args:
        model: a name or a path; by default ``qwen3-8b`` on CUDA and ``tiny`` on a CPU.
        dtype: ``"auto"`` is ``bfloat16`` on CUDA and ``float32`` on a CPU.
        verify_widths: by default the drafter's block size alone.
        accept_lengths: what is not named stays as in ``ACCEPT_LENGTHS``.

    Raises:
        Refused: a value outside what is accepted, naming the field.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise Refused("device", device, "auto, cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("device", device, "cpu; torch sees no CUDA device here")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = device == "cuda"
    shape = find_shape(model or ("qwen3-8b" if cuda else "tiny"))
    if dtype == "auto":
        dtype = "bfloat16" if cuda else "float32"
    if dtype not in DTYPES:
        raise Refused("dtype", dtype, f"auto, {', '.join(DTYPES)}")
    if not methods or not set(methods) <= set(METHODS) or len(set(methods)) < len(methods):
        raise Refused("methods", ",".join(methods), f"each at most once: {', '.join(METHODS)}")
    if concurrency is None:
        concurrency = (1, 8, 32) if cuda else (1, 4)
    if not concurrency or min(concurrency) < 1 or len(set(concurrency)) < len(concurrency):
        raise Refused("concurrency", list(concurrency), "different numbers of at least 1")
    if num_prompts is not None and num_prompts < max(concurrency):
        wanted = f"at least the highest concurrency, {max(concurrency)}"
        raise Refused("num_prompts", num_prompts, wanted)
    if input_len is None:
        input_len = 256 if cuda else 32
    if output_len is None:
        output_len = 512 if cuda else 64
    _at_least("input_len", input_len, 1)
    _at_least("output_len", output_len, 2)
    if input_len + output_len > shape.target.max_positions:
        raise Refused(
            "input_len + output_len",
            input_len + output_len,
            f"at most the {shape.target.max_positions} positions of {shape.name}",
        )
    if alternate is not None and not 1 <= alternate[0] < alternate[1]:
        raise Refused("alternate", list(alternate), "two numbers of at least 1, the lower first")
    _check_draft_head(draft_head_dtype, shape, device, dtype)
    if pool_size < 0:
        raise Refused("pool_size", pool_size, "at least 0, which scores the whole vocabulary")
    settings = EngineSettings(
        shape=shape,
        device=device,
        dtype=dtype,
        methods=tuple(methods),
        concurrency=tuple(concurrency),
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        verify_widths=_verify_widths(verify_widths, shape.block_size),
        accept_lengths={
            method: (accept_lengths or {}).get(method, ACCEPT_LENGTHS[method])
            for method in methods
            if method != TARGET
        },
        narrow_accept_lengths={
            method: found
            for method, found in (narrow_accept_lengths or {}).items()
            if method in methods
        },
        pool_size=pool_size,
        draft_head_dtype=draft_head_dtype,
        alternate=alternate,
        repeats=_at_least("repeats", (3 if cuda else 1) if repeats is None else repeats, 1),
        profile=profile,
        seed=_at_least("seed", seed, 0),
    )
    _check_laws(settings)
    return settings


def _verify_widths(asked: Sequence[int | str] | None, block_size: int) -> tuple[int | str, ...]:
    if asked is None:
        return (block_size,)
    if not asked or len(set(asked)) < len(asked):
        raise Refused("verify_width", list(asked), "different widths, at least one")
    for width in asked:
        if isinstance(width, int):
            check_verify_width(_at_least("verify_width", width, 2), block_size)
        elif width != AUTO:
            raise Refused("verify_width", width, f"a number or {AUTO}")
    return tuple(asked)


def _check_draft_head(found: str, shape: EngineShape, device: str, dtype: str) -> None:
    field = "draft_head_dtype"
    if found not in DRAFT_HEAD_DTYPES:
        raise Refused(field, found, f"one of {', '.join(DRAFT_HEAD_DTYPES)}")
    if found != "fp8":
        return
    if dtype == "float64":
        raise Refused(field, found, "auto where dtype is float64")
    obstacle = fp8_obstacle(torch.device(device))
    if obstacle:
        raise Refused(field, found, "auto on this device", obstacle)
    if shape.target.hidden_size % MULTIPLE:
        raise Refused(field, found, f"auto where the hidden size is no multiple of {MULTIPLE}")


def _check_laws(settings: EngineSettings) -> None:
    for method, length in settings.accept_lengths.items():
        width, _ = settings.narrow_accept_lengths.get(method, (2, 1.0))
        if not 2 <= width < settings.shape.block_size:
            wanted = f"a width of 2 to {settings.shape.block_size - 1}"
            raise Refused(f"narrow_accept_length of {method}", width, wanted)
        try:
            settings.law_of(method)
        except Refused as refused:
            raise Refused(f"accept_length of {method}", length, refused.wanted) from None


def _at_least(field: str, value: int, low: int) -> int:
    if value < low:
        raise Refused(field, value, f"at least {low}")
    return value
