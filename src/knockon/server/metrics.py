"""What Prometheus is told."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric

from knockon.server.messages import Delta, Stats

if TYPE_CHECKING:
    from knockon.server.submission import Submission

_TTFT = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_PER_TOKEN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_WHOLE = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_STEP = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """One server's, in a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self._running = Gauge("knockon_requests_running", "Sequences being computed.", **own)
        self._waiting = Gauge("knockon_requests_waiting", "Sequences queued.", **own)
        self._pages = Gauge("knockon_kv_pages", "KV pages by what they hold.", ["state"], **own)
        self._states = Gauge(
            "knockon_cached_states", "States of recurrent layers kept for later prompts.", **own
        )
        self._requests = Counter(
            "knockon_requests_finished", "Sequences by how they ended.", ["reason"], **own
        )
        self._refusals = Counter(
            "knockon_http_errors", "Requests answered by an error.", ["status"], **own
        )
        self._prompt = Counter(
            "knockon_prompt_tokens",
            "Tokens of prompts, for every sequence that goes on from one.",
            **own,
        )
        self._cached = Counter(
            "knockon_prefix_cache_hit_tokens", "Of those, found in the prefix cache.", **own
        )
        self._tokens = Counter("knockon_generation_tokens", "Tokens generated.", **own)
        self._preemptions = Counter(
            "knockon_preemptions", "Sequences computed again for want of pages.", **own
        )
        self._step = Histogram(
            "knockon_step_seconds", "One engine step on the host.", buckets=_STEP, **own
        )
        self._ttft = Histogram(
            "knockon_time_to_first_token_seconds", "From arrival.", buckets=_TTFT, **own
        )
        self._tpot = Histogram(
            "knockon_time_per_output_token_seconds",
            "After the first token, by sequence.",
            buckets=_PER_TOKEN,
            **own,
        )
        self._e2e = Histogram(
            "knockon_e2e_request_latency_seconds", "From arrival to end.", buckets=_WHOLE, **own
        )
        self._queued = Histogram(
            "knockon_queue_seconds",
            "From the engine's door to its first step.",
            buckets=_TTFT,
            **own,
        )
        self._speculation = _SpeculationCollector()
        self.registry.register(self._speculation)

    def stepped(self, seconds: float) -> None:
        """One engine step."""
        self._step.observe(seconds)

    def gained(self, submission: Submission, delta: Delta) -> None:
        """What a step gave a sequence, after the submission has taken it."""
        count = submission.num_tokens[delta.number]
        first = submission.first_token[delta.number]
        if delta.tokens:
            self._tokens.inc(len(delta.tokens))
            if count == len(delta.tokens):
                self._ttft.observe(first - submission.arrival)
        if delta.end is not None:
            now = time.perf_counter()
            self._requests.labels(delta.end.reason).inc()
            self._e2e.observe(now - submission.arrival)
            self._queued.observe(delta.end.queued)
            self._cached.inc(delta.end.cached_tokens)
            self._preemptions.inc(delta.end.preemptions)
            if count > 1:
                self._tpot.observe((now - first) / (count - 1))

    def prompted(self, tokens: int) -> None:
        """Sequences were handed to the engine, whose prompts have so many tokens in all."""
        self._prompt.inc(tokens)

    def aborted(self, count: int) -> None:
        """Sequences whose client has gone."""
        self._requests.labels("abort").inc(count)

    def refused(self, status: int) -> None:
        """A request was answered by an error."""
        self._refusals.labels(str(status)).inc()

    def render(self, stats: Stats | None) -> bytes:
        """The exposition text. Without fresh ``stats`` the last known gauges stay."""
        if stats is not None:
            self._running.set(stats.occupancy["running"])
            self._waiting.set(stats.occupancy["waiting"])
            for state in ("held", "cached"):
                self._pages.labels(state).set(stats.occupancy[f"{state}_pages"])
            self._states.set(stats.occupancy["cached_states"])
            self._speculation.metrics = stats.metrics
        return generate_latest(self.registry)


class _SpeculationCollector:
    """Accept lengths and times of decode steps, as the engine has counted them."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def collect(self) -> list[Metric]:
        """Verifications, how often each position of a block was kept, and what steps took."""
        lengths = {int(k): n for k, n in self.metrics.get("accept_lengths", {}).items()}
        by_position = CounterMetricFamily(
            "knockon_accepted_tokens_by_position",
            "Verifications that kept the token at this position; the last one kept is the bonus.",
            labels=["position"],
        )
        for position in range(max(lengths, default=0)):
            kept = sum(n for length, n in lengths.items() if length > position)
            by_position.add_metric([str(position)], kept)
        verifications = CounterMetricFamily(
            "knockon_verifications", "Verifications of one sequence's block."
        )
        verifications.add_metric([], sum(lengths.values()))
        kept_tokens = CounterMetricFamily(
            "knockon_verified_tokens", "Tokens kept by verifications, bonus included."
        )
        kept_tokens.add_metric([], sum(length * n for length, n in lengths.items()))
        widths = CounterMetricFamily(
            "knockon_decode_steps", "Decode steps by verify width.", labels=["width"]
        )
        for width, count in self.metrics.get("widths", {}).items():
            widths.add_metric([str(width)], count)
        return [by_position, verifications, kept_tokens, widths, *self._times()]

    def _times(self) -> list[Metric]:
        steps = self.metrics.get("timed_steps", 0)
        whole = SummaryMetricFamily(
            "knockon_decode_step_seconds",
            "A decode step, from draft to commit, where it runs.",
            count_value=steps,
            sum_value=self.metrics.get("step_seconds", 0.0),
        )
        parts = SummaryMetricFamily(
            "knockon_step_part_seconds",
            "Parts of a decode step, where they run one by one (not in CUDA graphs).",
            labels=["part"],
        )
        for part, seconds in self.metrics.get("part_seconds", {}).items():
            parts.add_metric([part], count_value=steps, sum_value=seconds)
        return [whole, parts]
