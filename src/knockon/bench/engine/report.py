"""What a run measured, as plain data: speeds, step times, where the time went, JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from knockon.bench.engine.alternate import Alternation, width_shares
from knockon.bench.engine.load import LoadResult
from knockon.bench.engine.reference import Reference
from knockon.bench.engine.settings import METHODS, EngineSettings
from knockon.bench.engine.shapes import draft_parameters, target_parameters
from knockon.bench.engine.trace import Profile
from knockon.bench.engine.variant import TARGET, Variant


@dataclass(frozen=True)
class Measurement:
    """One variant at one concurrency.

    Attributes:
        runs: one a repeat.
        profile: of some steps, where asked for.
    """

    variant: Variant
    concurrency: int
    num_prompts: int
    runs: tuple[LoadResult, ...]
    profile: Profile | None

    @property
    def tokens_per_second(self) -> float:
        """Median over repeats."""
        return self._median(lambda run: run.tokens_per_second)

    @property
    def step_ms(self) -> float | None:
        """Median over repeats of the mean full decode step."""
        times = [run.full_step for run in self.runs if run.full_step is not None]
        return median(times) * 1e3 if times else None

    @property
    def time_to_first_token_ms(self) -> float:
        """Median over repeats of the mean over requests."""
        return self._median(lambda run: run.time_to_first_token) * 1e3

    @property
    def time_per_token_ms(self) -> float:
        """Median over repeats of the mean over requests, of tokens after the first."""
        return self._median(lambda run: run.time_per_token) * 1e3

    @property
    def accept_length(self) -> float:
        """Tokens kept per verification; those past the output length are not kept."""
        return self._median(lambda run: run.accept_length)

    @property
    def widths(self) -> dict[int, float]:
        """Share of decode steps by verify width, of all runs."""
        return width_shares(run.widths for run in self.runs)

    def _median(self, of: Callable[[LoadResult], float]) -> float:
        return median(of(run) for run in self.runs)


@dataclass(frozen=True)
class VariantFacts:
    """What a variant ran on.

    Attributes:
        memory: peak bytes on the GPU over all of its runs, KV for the highest concurrency
            included; ``None`` on a CPU.
        rollout: ``"fused"`` or ``"plain"``, of Domino.
        why_plain: why the kernels did not run; empty where they did.
        draft_head_dtype: of the LM head that proposes; ``None`` where nothing is drafted.
        graphs: CUDA graphs captured.
        capture_seconds: what that took.
        prompts_by: what takes prompts through recurrent layers, ``"fla"`` or ``"torch"``; ``None``
            without such layers.
        state_dtype: what their states are kept in; ``None`` likewise.
    """

    memory: int | None
    rollout: str | None
    why_plain: str
    draft_head_dtype: str | None
    graphs: int
    capture_seconds: float
    prompts_by: str | None
    state_dtype: str | None


@dataclass(frozen=True)
class EngineReport:
    """A whole run.

    Attributes:
        device: its name; says so where it is a CPU.
        facts: by variant.
        environment: versions and hardware.
    """

    settings: EngineSettings
    device: str
    measurements: tuple[Measurement, ...]
    facts: Mapping[str, VariantFacts]
    environment: Mapping[str, Any]
    reference: Reference | None = None
    alternations: tuple[Alternation, ...] = ()

    def at(self, label: str, concurrency: int) -> Measurement | None:
        """The measurement of a variant."""
        for found in self.measurements:
            if (found.variant.label, found.concurrency) == (label, concurrency):
                return found
        return None

    @property
    def profiled(self) -> bool:
        """Whether any steps were traced."""
        return any(found.profile is not None for found in self.measurements)

    @property
    def title(self) -> str:
        """Shape, precision and device; says so where it is a CPU."""
        s = self.settings
        return f"Engine, {s.shape.name} (random weights), {s.dtype}, {self.device}"

    @property
    def method(self) -> str:
        """How the numbers came about, and what they do not mean."""
        s = self.settings
        text = (
            f"{s.input_len} tokens in, {s.output_len} out, greedy, requests kept in flight; output "
            f"tokens over the whole time, prefill included; median of {s.repeats}"
        )
        if s.accept_lengths:
            lengths = ", ".join(f"{name} {value:g}" for name, value in s.accept_lengths.items())
            text += (
                f"; synthetic accept lengths {lengths} where all {s.shape.block_size} positions "
                "are verified, cut off at narrower widths"
            )
            for name, (width, mean) in s.narrow_accept_lengths.items():
                text += f", {name} {mean:g} where {width} are"
            if s.draft_head_dtype != "auto":
                text += f"; proposals from an LM head in {s.draft_head_dtype}"
        return text + "; no text is decoded"

    def speed_up(self, measured: Measurement) -> float | None:
        """Times the target alone, in the same run."""
        alone = self.at(TARGET, measured.concurrency)
        return measured.tokens_per_second / alone.tokens_per_second if alone is not None else None

    def against_best_fixed(self, found: Measurement | Alternation) -> float | None:
        """An adaptive width's speed by the best fixed one's; ``None`` where there is none."""
        if found.variant.fixed:
            return None
        others: list[float]
        if isinstance(found, Alternation):
            others = [a.tokens_per_second for a in self.alternations if _rival(a, found)]
        else:
            others = [
                m.tokens_per_second
                for m in self.measurements
                if m.concurrency == found.concurrency and _rival(m, found)
            ]
        return found.tokens_per_second / max(others) if others else None

    def against_reference(self, measured: Measurement) -> float | None:
        """Times the reference's speed, ``None`` where it has none."""
        if self.reference is None:
            return None
        key = (measured.variant.method, measured.concurrency)
        theirs = self.reference.tokens_per_second.get(key)
        return measured.tokens_per_second / theirs if theirs is not None else None

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain data; times in milliseconds, sizes in bytes."""
        s = self.settings
        names = (
            *("device", "dtype", "methods", "concurrency", "input_len", "output_len"),
            *("verify_widths", "pool_size", "draft_head_dtype", "alternate", "repeats", "seed"),
        )
        shape = s.shape
        return {
            "benchmark": "engine",
            "title": self.title,
            "method": self.method,
            "device_name": self.device,
            "environment": dict(self.environment),
            "shape": {
                "name": shape.name,
                "target": _plain(asdict(shape.target)),
                "draft": _plain(asdict(shape.domino)),
                "target_parameters": target_parameters(shape.target),
                "dflash_parameters": draft_parameters(shape.dflash),
                "domino_parameters": draft_parameters(shape.domino),
            },
            "settings": {name: getattr(s, name) for name in names}
            | {
                "accept_lengths": dict(s.accept_lengths),
                "narrow_accept_lengths": dict(s.narrow_accept_lengths),
            },
            "methods": {name: METHODS[name] for name in s.methods},
            "facts": {name: asdict(facts) for name, facts in self.facts.items()},
            "reference": None if self.reference is None else self._reference(self.reference),
            "results": [self._row(found) for found in self.measurements],
            "alternating": [self._alternation(found) for found in self.alternations],
        }

    def _reference(self, reference: Reference) -> dict[str, Any]:
        return {
            "name": reference.name,
            "measured": reference.measured,
            **reference.conditions,
            "differences": reference.differences(self.settings),
        }

    def _asked(self, variant: Variant) -> float | None:
        """The mean accept length that the law gives at that width."""
        if variant.method == TARGET:
            return 1.0
        if not isinstance(variant.width, int):
            return None
        return self.settings.law_of(variant.method).mean_at(variant.width)

    def _alternation(self, found: Alternation) -> dict[str, Any]:
        return {
            "label": found.variant.label,
            "method": found.variant.method,
            "verify_width": found.variant.width,
            "low": found.low,
            "high": found.high,
            "tokens_per_second": round(found.tokens_per_second, 2),
            "at_low": round(found.at_low, 2),
            "at_high": round(found.at_high, 2),
            "times_best_fixed": _rounded(self.against_best_fixed(found)),
            "width_shares_low": {w: round(s, 4) for w, s in found.widths(0).items()},
            "width_shares_high": {w: round(s, 4) for w, s in found.widths(1).items()},
            "phases": [asdict(phase) for phase in found.phases],
        }

    def _row(self, found: Measurement) -> dict[str, Any]:
        return {
            "label": found.variant.label,
            "method": found.variant.method,
            "verify_width": found.variant.width,
            "concurrency": found.concurrency,
            "num_prompts": found.num_prompts,
            "tokens_per_second": round(found.tokens_per_second, 2),
            "step_ms": _rounded(found.step_ms),
            "times_target": _rounded(self.speed_up(found)),
            "times_reference": _rounded(self.against_reference(found)),
            "times_best_fixed": _rounded(self.against_best_fixed(found)),
            "width_shares": {w: round(share, 4) for w, share in found.widths.items()},
            "accept_length_asked": _rounded(self._asked(found.variant)),
            "accept_length": round(found.accept_length, 4),
            "time_to_first_token_ms": round(found.time_to_first_token_ms, 3),
            "time_per_token_ms": round(found.time_per_token_ms, 4),
            "runs": [asdict(run) for run in found.runs],
            "profile": None if found.profile is None else _profile(found.profile),
        }


def _rival(other: Measurement | Alternation, adaptive: Measurement | Alternation) -> bool:
    return other.variant.fixed and other.variant.method == adaptive.variant.method


def _profile(found: Profile) -> dict[str, Any]:
    names = ("name", "part", "ms", "calls")
    return {
        "kind": found.kind,
        "steps": found.steps,
        "wall_ms": _rounded(found.wall_ms),
        "busy_ms": _rounded(found.busy_ms),
        "idle": _rounded(found.idle),
        "parts_ms": {part: _rounded(ms) for part, ms in found.parts_ms.items()},
        "top": [
            dict(zip(names, (name, part, round(ms, 4), round(calls, 2)), strict=True))
            for name, part, ms, calls in found.top
        ],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _plain(value: Any) -> Any:
    """What JSON has no word for (a dtype), as text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else str(value)
