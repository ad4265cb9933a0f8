"""The run: a method after the other, each at its widths, and there at every concurrency."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from knockon.bench.engine.alternate import Alternation, alternate, phases_of
from knockon.bench.engine.assemble import assemble_engine, choose_backend
from knockon.bench.engine.load import ClosedLoop, LoadResult, random_prompts, serve
from knockon.bench.engine.reference import Reference
from knockon.bench.engine.report import EngineReport, Measurement, VariantFacts
from knockon.bench.engine.settings import PROFILED_STEPS, EngineSettings
from knockon.bench.engine.synthetic import choose_seeds
from knockon.bench.engine.trace import Profile, trace
from knockon.bench.engine.variant import TARGET, Variant
from knockon.bench.engine.weights import random_drafter, random_target, target_bytes
from knockon.bench.environment import environment
from knockon.engine.build_runner import this_device
from knockon.engine.engine import Engine
from knockon.engine.hardware import available_memory
from knockon.engine.pipelined import PipelinedRunner
from knockon.engine.speculate import Accept, accept_drawn
from knockon.errors import Refused
from knockon.layers.fla_chunks import FlaChunks
from knockon.models.decoder import Decoder
from knockon.models.gated_delta_net import GatedDeltaNet
from knockon.models.target import POSITION_SLACK
from knockon.parallel import SingleRank

_WARM_UP_TOKENS = 64


def requests_in(settings: EngineSettings) -> int:
    """How many requests a run ends, warm-ups included: what a progress bar counts to."""
    rounds = sum(c + settings.repeats * settings.prompts_at(c) for c in settings.concurrency)
    trace = 0
    if settings.alternate is not None:
        trace = sum(count for _, count in phases_of(*settings.alternate, settings.alternations))
    drafting = sum(variant.method != TARGET for variant in settings.variants)
    return len(settings.variants) * rounds + drafting * trace


def measure(
    settings: EngineSettings,
    reference: Reference | None = None,
    doing: Callable[[str], None] = lambda text: None,
    ended: Callable[[], None] = lambda: None,
    done: Callable[[str], None] = lambda text: None,
    so_far: Callable[[EngineReport], None] = lambda report: None,
) -> EngineReport:
    """Carry out a run.

    Args:
        doing: told what is under way.
        ended: called at the end of every request.
        done: told a line for each variant and concurrency.
        so_far: given the report of what is measured, after every variant.
    """
    device = this_device(settings.device, SingleRank())
    check_room(settings, device)
    doing(f"{settings.shape.name}: random weights")
    positions = settings.max_length + POSITION_SLACK
    shape = settings.shape
    target = random_target(shape.target, settings.torch_dtype, device, positions, settings.seed)
    target.attention = choose_backend(settings.device, settings.dtype)
    measurements: list[Measurement] = []
    alternations: list[Alternation] = []
    facts: dict[str, VariantFacts] = {}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    here = environment()

    def report() -> EngineReport:
        found = (tuple(measurements), dict(facts), here, reference, tuple(alternations))
        return EngineReport(settings, name, *found)

    for method in settings.methods:
        drafting = None if method == TARGET else Drafting(settings, method, target)
        for variant in settings.variants_of(method):
            doing(f"{variant.label}: assembling the engine")
            bench = VariantBench(settings, variant, target, drafting, doing, ended)
            for concurrency in settings.concurrency:
                found = bench.measure(concurrency)
                measurements.append(found)
                done(progress_line(found))
            if settings.alternate is not None and drafting is not None:
                alternations.append(bench.alternate(*settings.alternate))
                done(alternation_line(alternations[-1]))
            facts[variant.label] = bench.facts()
            so_far(report())
            del bench  # before the next is made: both would count in its peak memory
            if drafting is not None:
                drafting.drafter.bind_kv(0)
            gc.collect()
    return report()


def check_room(settings: EngineSettings, device: torch.device) -> None:
    """Hold the target's weights to the memory there is, before they are made.

    Raises:
        Refused: they are larger.
    """
    needed = target_bytes(settings.shape.target, settings.torch_dtype)
    room = available_memory(device)
    if needed > room:
        wanted = f"weights of at most {room / 2**30:.1f} GiB, which are available on {device.type}"
        hint = f"In {settings.dtype} these take {needed / 2**30:.1f}."
        raise Refused("model", settings.shape.name, wanted, hint)


def recurrence_of(engine: Engine, target: Decoder) -> tuple[str | None, str | None]:
    """What takes prompts through recurrent layers, and what their states are kept in."""
    if engine.states is None:
        return None, None
    layers = [m for m in target.modules() if isinstance(m, GatedDeltaNet)]
    by_kernels = any(isinstance(layer.chunks, FlaChunks) for layer in layers)
    return "fla" if by_kernels else "torch", engine.capacity().state_dtype


def progress_line(found: Measurement) -> str:
    """One line on one variant at one concurrency."""
    step = "-" if found.step_ms is None else f"{found.step_ms:.2f} ms a step"
    return (
        f"{found.variant.label:<11} concurrency {found.concurrency:>3}  "
        f"{found.tokens_per_second:9.1f} tok/s, {step}, accept length {found.accept_length:.2f}"
    )


def alternation_line(found: Alternation) -> str:
    """One line on one variant over the alternating trace."""
    between = f"{found.low} and {found.high}"
    return (
        f"{found.variant.label:<11} between {between:>7}  {found.tokens_per_second:9.1f} tok/s: "
        f"{found.at_low:.1f} at {found.low}, {found.at_high:.1f} at {found.high}"
    )


class Drafting:
    """A method's drafter and what it has accepted: the same at every verify width."""

    def __init__(self, settings: EngineSettings, method: str, target: Decoder) -> None:
        shape = settings.shape
        config = shape.domino if method == "domino" else shape.dflash
        self.backbone = config.backbone
        self.drafter = random_drafter(
            config,
            target,
            settings.max_length + POSITION_SLACK,
            settings.pool_size,
            settings.seed + 1,
            settings.draft_head_dtype,
        )
        self.accept = settings.law_of(method)


class VariantBench:
    """One variant's engine, made once, and its measurements."""

    def __init__(
        self,
        settings: EngineSettings,
        variant: Variant,
        target: Decoder,
        drafting: Drafting | None,
        doing: Callable[[str], None],
        ended: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.variant = variant
        self.target = target
        self._doing = doing
        self._ended = ended
        self._prompts = torch.Generator().manual_seed(settings.seed)
        if settings.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(target.device)
        self.accept = drafting.accept if drafting is not None else None
        accept: Accept = self.accept or accept_drawn
        self.engine: Engine = assemble_engine(
            target,
            drafting.drafter if drafting is not None else None,
            drafting.backbone if drafting is not None else None,
            verify_width=variant.width,
            max_batch_size=settings.max_batch_size,
            max_length=settings.max_length,
            accept=accept,
        )

    def measure(self, concurrency: int) -> Measurement:
        """Warm up, serve the requests ``repeats`` times, then trace if that is asked for."""
        s = self.settings
        what = f"{self.variant.label}, concurrency {concurrency}"
        self._doing(f"{what}: warming up")
        self._serve(concurrency, concurrency, min(s.output_len, _WARM_UP_TOKENS))
        count = s.prompts_at(concurrency)
        runs = []
        for number in range(s.repeats):
            self._doing(f"{what}: run {number + 1} of {s.repeats}")
            runs.append(self._serve(concurrency, count, s.output_len))
        profile = None
        if s.profile:
            self._doing(f"{what}: tracing")
            profile = self._trace(concurrency)
        return Measurement(self.variant, concurrency, count, tuple(runs), profile)

    def alternate(self, low: int, high: int) -> Alternation:
        """Go back and forth between two concurrencies."""
        s = self.settings
        self._doing(f"{self.variant.label}: between {low} and {high} requests in flight")
        return alternate(
            self.variant,
            low,
            high,
            s.alternations,
            lambda concurrency, count: self._serve(concurrency, count, s.output_len),
        )

    def facts(self) -> VariantFacts:
        """Peak memory, graphs, and what the rollout ran on."""
        device = self.engine.runner.target.device
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        counted = self.engine.metrics()
        runner = self.engine.runner
        graphs = runner.graphs if isinstance(runner, PipelinedRunner) else None
        return VariantFacts(
            memory,
            counted.implementation,
            counted.why_plain,
            counted.draft_head_dtype,
            0 if graphs is None else graphs.count,
            0.0 if graphs is None else graphs.seconds,
            *recurrence_of(self.engine, self.target),
        )

    def _serve(self, concurrency: int, count: int, output_len: int) -> LoadResult:
        prompts, seeds = self._requests(count, output_len)
        return serve(self.engine, concurrency, prompts, seeds, output_len, self._ended)

    def _trace(self, concurrency: int) -> Profile | None:
        prompts, seeds = self._requests(concurrency, self.settings.output_len)
        loop = ClosedLoop(self.engine, concurrency, prompts, seeds, self.settings.output_len)
        found = trace(loop, PROFILED_STEPS)
        loop.abandon()
        return found

    def _requests(self, count: int, output_len: int) -> tuple[list[list[int]], list[int]]:
        s = self.settings
        vocab_size = s.shape.target.vocab_size
        prompts = random_prompts(count, s.input_len, vocab_size, self._prompts)
        if self.accept is None:
            return prompts, list(range(count))
        return prompts, list(choose_seeds(self.accept, count, s.input_len, output_len, s.seed))
