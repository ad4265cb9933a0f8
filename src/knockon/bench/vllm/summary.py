"""The report of ``benchmarks/vllm_h200.py``: put together, judged, shown in a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

from knockon.errors import Refused

# How answers were made; the parts of ``lossless``.
ANSWERS = ("eager", "graphs")
# Domino's tokens a second over DFlash's may fall this far short of their accept lengths' ratio.
SHORT_OF_ACCEPT_LENGTHS = 0.03
# vLLM's accept length may be this far from that of Knockon's engine.
ACCEPT_LENGTH_APART = 0.02
# Milliseconds that a Domino step may take beyond DFlash's, by concurrency.
STEP_BEYOND = {1: 0.3, 32: 0.5}


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report out of those of runs with different parts.

    An engine that several of them started is in ``runs`` as ``domino``, ``domino (2)`` and so on.
    ``environment`` is the first one's; notes are put after one another.

    Raises:
        Refused: two of them have the same part (of ``lossless``: the same kind of answers, or
            another vLLM or number of answers).
    """
    whole: dict[str, Any] = {"runs": {}}
    for report in reports:
        for name, value in report.items():
            if name == "runs":
                for run, found in value.items():
                    whole["runs"][_free(run, whole["runs"])] = found
            elif name == "environment":
                whole.setdefault(name, value)
            elif name == "prompts":
                if whole.setdefault(name, value) != value:
                    raise Refused(name, value, f"as many as in the others, {whole[name]}")
            elif name == "note":
                whole[name] = " ".join(filter(None, [whole.get(name), value]))
            elif name == "lossless":
                whole[name] = _lossless(whole.get(name, {}), value)
            elif name in whole:
                raise Refused("part", name, "each in one report only")
            else:
                whole[name] = value
    return whole


def _lossless(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Eager answers of one report and those in graphs of another, of the same vLLM."""
    for name in first.keys() & second.keys():
        if name in ANSWERS:
            raise Refused("part", f"lossless.{name}", "each in one report only")
        if first[name] != second[name]:
            raise Refused(f"lossless.{name}", second[name], f"{first[name]}, as in the other")
    return {**first, **second}


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """``name``, or with the first number from 2 on that nobody has."""
    name = name.partition(" (")[0]
    numbered = (f"{name} ({number})" for number in count(2))
    return next(free for free in chain([name], numbered) if free not in taken)


def by_drafter(rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Rows of a part by concurrency and drafter."""
    found: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["concurrency"], {})[row["drafter"]] = row
    return dict(sorted(found.items()))


def speed_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Domino's tokens a second over DFlash's, beside the ratio of their accept lengths."""
    found = []
    for concurrency, row in by_drafter(rows).items():
        if "domino" in row and "dflash" in row:
            speed, accept = (
                row["domino"][name] / row["dflash"][name]
                for name in ("tokens_per_second", "accept_length")
            )
            found.append(
                {
                    "concurrency": concurrency,
                    "tokens_per_second": speed,
                    "accept_length": accept,
                    "speed_over_accept": speed / accept,
                    "reached": speed / accept >= 1 - SHORT_OF_ACCEPT_LENGTHS,
                }
            )
    return found


def step_differences(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Milliseconds that a Domino step takes beyond a DFlash step."""
    found = []
    for concurrency, row in by_drafter(rows).items():
        if "domino" in row and "dflash" in row:
            beyond = row["domino"]["step_ms"] - row["dflash"]["step_ms"]
            most = STEP_BEYOND.get(concurrency)
            reached = None if most is None else beyond <= most
            found.append({"concurrency": concurrency, "beyond_ms": beyond, "reached": reached})
    return found


def accept_lengths_apart(report: Mapping[str, Any]) -> dict[str, float]:
    """By how much of Knockon's accept length vLLM's is longer (negative: shorter).

    Both count the tokens of answers only, where the report has that of vLLM; without it, vLLM's
    counts what was accepted past their ends, too.
    """
    ours = report.get("knockon", {}).get("accept_length")
    theirs = report.get("lossless", {})
    lengths = {
        name: theirs[name].get("kept_length", theirs[name]["accept_length"])
        for name in ANSWERS
        if name in theirs
    }
    return {name: length / ours - 1 for name, length in lengths.items()} if ours else {}


def failures(report: Mapping[str, Any]) -> list[str]:
    """What must not be."""
    found = [
        f"{name} failed: {run['error'].strip().splitlines()[-1]}"
        for name, run in report.get("runs", {}).items()
        if run.get("error")
    ]
    for name, counts in report.get("agreement", {}).items():
        if isinstance(counts, dict) and counts["same"] < counts["of"]:
            found.append(f"{counts['of'] - counts['same']} chains of {name} differ from by hand")
    for name in ANSWERS:
        for gap in report.get("lossless", {}).get(name, {}).get("differences", ()):
            if not gap["near_tie"]:
                found.append(f"{name}: answer {gap['answer']} differs at {gap['at']}, no near tie")
    return found


def summary(report: Mapping[str, Any]) -> str:
    """A few lines of text, then what failed."""
    failed = failures(report) or ["no difference that rounding does not explain"]
    return "\n".join([*_lines(report), *failed])


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    if "note" in report:
        yield report["note"]
    for name, run in report.get("runs", {}).items():
        yield f"{name:<18}{run['seconds']:8.1f} s{'  FAILED' if run.get('error') else ''}"
    for name, counts in report.get("agreement", {}).items():
        if isinstance(counts, dict):
            yield f"chains as by hand, {name}: {counts['same']} of {counts['of']}"
    lossless = report.get("lossless", {})
    for name in ANSWERS:
        if name in lossless:
            gaps = lossless[name].get("differences")
            same = "target not run"
            if gaps is not None:
                ties = sum(gap["near_tie"] for gap in gaps)
                same = f"{lossless['answers'] - len(gaps)} of {lossless['answers']} answers the "
                same += f"target's, {ties} of {len(gaps)} others near ties"
            accept = f"accept length {lossless[name]['accept_length']:.3f}"
            if "kept_length" in lossless[name]:
                accept += f", {lossless[name]['kept_length']:.3f} kept"
            yield f"{name}: {same}; {accept}"
    if "knockon" in report:
        apart = accept_lengths_apart(report).items()
        beside = "".join(
            f", {name} {100 * gap:+.2f} %"
            + ("" if "kept_length" in lossless[name] else " by vLLM's count")
            for name, gap in apart
        )
        yield f"Knockon's engine: accept length {report['knockon']['accept_length']:.3f}{beside}"
    for concurrency, row in by_drafter(report.get("speed", ())).items():
        for name, found in row.items():
            rate, accept = found["tokens_per_second"], found["accept_length"]
            step = f"step {found['step_ms']:6.2f} ms"
            yield f"speed {concurrency:>3} {name:<8}{rate:9.1f} tok/s  accept {accept:.3f}  {step}"
    for ratio in speed_ratios(report.get("speed", ())):
        yield (
            f"Domino / DFlash at {ratio['concurrency']}: tok/s {ratio['tokens_per_second']:.3f}, "
            f"accept length {ratio['accept_length']:.3f}, the one over the other "
            f"{ratio['speed_over_accept']:.3f}: {_reached(ratio['reached'])}"
        )
    for concurrency, row in by_drafter(report.get("step", ())).items():
        for name, found in row.items():
            rate = f"{found['tokens_per_second']:9.1f} tok/s"
            yield f"step  {concurrency:>3} {name:<8}{found['step_ms']:8.3f} ms  {rate}"
    for gap in step_differences(report.get("step", ())):
        beyond = f"Domino - DFlash at {gap['concurrency']}: {gap['beyond_ms']:+.3f} ms"
        yield beyond if gap["reached"] is None else f"{beyond}: {_reached(gap['reached'])}"


def _reached(found: bool) -> str:
    return "reached" if found else "missed"
