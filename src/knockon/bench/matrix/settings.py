"""What a matrix is asked to do; saved beside its results, and what they must agree in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from knockon.bench.matrix.methods import ServedMethod
from knockon.bench.matrix.workloads import ServedWorkload
from knockon.errors import Refused

# What may differ between runs into one folder: cells are added along these.
AXES = ("methods", "workloads", "concurrencies", "repeats")
# What each cell is measured with; the same for all of a folder.
FIXED = (
    *("model", "output_len", "warmup_requests", "seed", "request_rate", "temperature"),
    *("chat", "ignore_eos", "serve_arguments"),
)


@dataclass(frozen=True)
class MatrixSettings:
    """Checked once.

    Args:
        model: as named.
        model_path: where it lies.
        drafters: path by kind; ``None`` for the target's own MTP head.
        num_prompts: most prompts of a cell by concurrency, drawn by ``seed``; ``None`` for all.
        output_len: most tokens of an answer.
        warmup_requests: sent before and not counted; ``None`` for as many as the concurrency.
        request_rate: requests a second, at Poisson times; infinite sends as places come free.
        chat: through the chat template.
        ignore_eos: answers of exactly ``output_len`` tokens.
        serve_arguments: passed on to ``knockon serve``.
        servers_ahead: started beside a cell's own and idle while it is measured; may differ between
            runs into one folder.
        save_texts: keep the answers, not only their digests.
        start_timeout: seconds for a server to get ready.
        request_timeout: seconds for one request.

    Raises:
        Refused: a value out of range.
    """

    model: str
    model_path: str
    drafters: Mapping[str, str | None]
    methods: tuple[ServedMethod, ...]
    workloads: tuple[ServedWorkload, ...]
    concurrencies: tuple[int, ...]
    repeats: int = 1
    num_prompts: Mapping[int, int | None] = field(default_factory=dict)
    output_len: int = 512
    warmup_requests: int | None = None
    seed: int = 1
    request_rate: float = math.inf
    temperature: float = 0.0
    chat: bool = True
    ignore_eos: bool = False
    serve_arguments: tuple[str, ...] = ()
    servers_ahead: int = 0
    save_texts: bool = False
    start_timeout: float = 900.0
    request_timeout: float = 3600.0

    def __post_init__(self) -> None:
        if not self.methods:
            raise Refused("methods", (), "at least one")
        for each in self.concurrencies:
            if each < 1 or self.concurrencies.count(each) > 1:
                raise Refused("concurrency", each, "at least 1, and each once")
        for name in ("repeats", "output_len"):
            if getattr(self, name) < 1:
                raise Refused(name, getattr(self, name), "at least 1")
        for concurrency, count in self.num_prompts.items():
            if concurrency not in self.concurrencies:
                raise Refused("num_prompts", concurrency, f"concurrencies: {self.concurrencies}")
            if count is not None and count < 1:
                raise Refused("num_prompts", count, "at least 1")
        if self.servers_ahead < 0:
            raise Refused("servers_ahead", self.servers_ahead, "0 or more")
        if self.warmup_requests is not None and self.warmup_requests < 0:
            raise Refused("warmup_requests", self.warmup_requests, "0 or more")
        for name in ("request_rate", "start_timeout", "request_timeout"):
            if not getattr(self, name) > 0:
                raise Refused(name, getattr(self, name), "more than 0")
        if not 0 <= self.temperature < math.inf:
            raise Refused("temperature", self.temperature, "0 or more")

    def prompts_of(self, workload: ServedWorkload, concurrency: int) -> int:
        """Requests of a cell."""
        most = self.num_prompts.get(concurrency)
        return workload.prompts if most is None else min(most, workload.prompts)

    def requests_of(self, workload: str, concurrency: int) -> int:
        """Likewise, by the workload's name."""
        return self.prompts_of(next(w for w in self.workloads if w.name == workload), concurrency)

    def warmups_at(self, concurrency: int) -> int:
        """Warm-up requests of a cell."""
        return concurrency if self.warmup_requests is None else self.warmup_requests

    def to_json(self) -> dict[str, Any]:
        """What is saved: all that decides what a cell measures."""
        found: dict[str, Any] = {name: getattr(self, name) for name in FIXED}
        found["request_rate"] = str(self.request_rate)  # JSON has no infinity
        found["serve_arguments"] = list(self.serve_arguments)
        found["drafters"] = dict(self.drafters)
        found["num_prompts"] = {str(c): self.num_prompts.get(c) for c in self.concurrencies}
        found["methods"] = [method.name for method in self.methods]
        found["workloads"] = {
            w.name: {"file": str(w.path), "prompts": w.prompts, "sha256": w.sha256}
            for w in self.workloads
        }
        found["concurrencies"] = list(self.concurrencies)
        found["repeats"] = self.repeats
        found["servers_ahead"] = self.servers_ahead
        return found


def merge(saved: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a folder that ``asked`` adds cells to.

    Raises:
        Refused: by field, what its cells were not measured with.
    """

    def agree(field: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            hint = "Cells of other settings belong into another folder."
            raise Refused(field, ours, f"{theirs!r}, as {where} has it", hint)

    for name in FIXED:
        agree(name, asked[name], saved.get(name))
    for name in ("drafters", "num_prompts"):
        for key in asked[name].keys() & saved[name].keys():
            agree(f"{name} {key}", asked[name][key], saved[name][key])
    for name in asked["workloads"].keys() & saved["workloads"].keys():
        for key in ("sha256", "prompts"):
            theirs = saved["workloads"][name][key]
            agree(f"workload {name} {key}", asked["workloads"][name][key], theirs)
    found = dict(saved)
    for name in ("drafters", "num_prompts", "workloads"):
        found[name] = {**saved[name], **asked[name]}
    for name in ("methods", "concurrencies"):
        found[name] = _union(saved[name], asked[name])
    found["concurrencies"].sort()
    found["servers_ahead"] = asked["servers_ahead"]
    found["repeats"] = max(saved["repeats"], asked["repeats"])
    return found


def parse_num_prompts(text: str | None, concurrencies: Sequence[int]) -> dict[int, int | None]:
    """Read ``"16"``, or ``"1=8,32=64"`` by concurrency; a concurrency left out takes all.

    Raises:
        Refused: anything else.
    """
    found: dict[int, int | None] = dict.fromkeys(concurrencies)
    if text is None:
        return found
    try:
        if "=" not in text:
            return dict.fromkeys(concurrencies, int(text))
        for part in text.split(","):
            concurrency, _, count = part.partition("=")
            if int(concurrency) in found:
                found[int(concurrency)] = int(count)
            else:
                raise Refused("num_prompts", part, f"one of the concurrencies {concurrencies}")
    except ValueError as error:
        if isinstance(error, Refused):
            raise
        raise Refused("num_prompts", text, "a number, or C=N for concurrencies C") from None
    return found


def _union(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    return [*first, *(each for each in second if each not in first)]
