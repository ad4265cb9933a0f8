"""What a run of the benchmark is asked for, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from knockon.bench.engine.shapes import EngineShape, find_shape
from knockon.bench.engine.synthetic import acceptance_rate
from knockon.engine.config import check_verify_width
from knockon.errors import Refused

TARGET = "target"
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
        verify_width: of the drafting methods.
        accept_lengths: means wanted, for each drafting method.
        pool_size: Domino's ``K``.
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
    verify_width: int
    accept_lengths: Mapping[str, float]
    pool_size: int
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

    def width_of(self, method: str) -> int:
        """Positions verified at a time."""
        return 1 if method == TARGET else self.verify_width


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
    verify_width: int | None = None,
    accept_lengths: Mapping[str, float] | None = None,
    pool_size: int = 2048,
    repeats: int | None = None,
    profile: bool = False,
    seed: int = 0,
) -> EngineSettings:
    """Fill in what depends on the device, and check everything.

    Args:
        model: a name or a path; by default ``qwen3-8b`` on CUDA and ``tiny`` on a CPU.
        dtype: ``"auto"`` is ``bfloat16`` on CUDA and ``float32`` on a CPU.
        verify_width: by default the drafter's block size.
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
    width = shape.block_size if verify_width is None else _at_least("verify_width", verify_width, 2)
    check_verify_width(width, shape.block_size)
    if pool_size < 0:
        raise Refused("pool_size", pool_size, "at least 0, which scores the whole vocabulary")
    return EngineSettings(
        shape=shape,
        device=device,
        dtype=dtype,
        methods=tuple(methods),
        concurrency=tuple(concurrency),
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        verify_width=width,
        accept_lengths=_accept_lengths(accept_lengths or {}, methods, width),
        pool_size=pool_size,
        repeats=_at_least("repeats", (3 if cuda else 1) if repeats is None else repeats, 1),
        profile=profile,
        seed=_at_least("seed", seed, 0),
    )


def parse_methods(text: str) -> tuple[str, ...]:
    """``"target,domino"`` to its parts."""
    return tuple(part.strip() for part in text.split(","))


def parse_accept_lengths(text: str) -> dict[str, float]:
    """``"dflash=6.878,domino=9.16"`` to numbers by method.

    Raises:
        Refused: anything else.
    """
    wanted = f"METHOD=MEAN with commas between, of {', '.join(ACCEPT_LENGTHS)}"
    found: dict[str, float] = {}
    for part in text.split(","):
        method, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or method not in ACCEPT_LENGTHS or method in found:
            raise Refused("accept_length", part, wanted)
        try:
            found[method] = float(value)
        except ValueError:
            raise Refused("accept_length", part, wanted) from None
    return found


def parse_concurrency(text: str) -> tuple[int, ...]:
    """``"1,8,32"`` to numbers.

    Raises:
        Refused: anything else.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise Refused("concurrency", text, "numbers with commas between, e.g. 1,8,32") from None


def _accept_lengths(
    asked: Mapping[str, float], methods: Sequence[str], width: int
) -> dict[str, float]:
    lengths = {}
    for method in methods:
        if method != TARGET:
            lengths[method] = asked.get(method, ACCEPT_LENGTHS[method])
            try:
                acceptance_rate(lengths[method], width)
            except Refused as refused:
                raise Refused(
                    f"accept_length of {method}", lengths[method], refused.wanted
                ) from None
    return lengths


def _at_least(field: str, value: int, low: int) -> int:
    if value < low:
        raise Refused(field, value, f"at least {low}")
    return value
