"""SmolLM2 and its shipped drafter on a device: the same tokens, and how much sooner.

    python benchmarks/real_model_gpu.py [--prompts workloads.jsonl] [--parts lossless ties speed]

- lossless: in FP32, Domino and the same backbone as plain DFlash must give the target's own
  answers, token for token, at every width, at widths chosen step by step and at widths that change
  at every step, one request at a time and eight.
- ties: in BF16, how many answers are the target's own; where one first differs, the target in FP32
  says how near a tie the two tokens were.
- speed: in BF16, tokens a second of the target alone and of Domino, by workload and requests in
  flight.

Prompts have a ``workload`` and a ``prompt`` a line (``workload_prompts.py`` makes such a file). The
result goes to ``real_model_<device>.json`` in ``--out``; the exit status is 1 where an answer in
FP32 is another, or a difference in BF16 no near tie.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from knockon.bench.environment import environment
from knockon.bench.loaded import BoundRunner, LoadedModels, answer, mean_accept_length
from knockon.bench.near_ties import Parting, part
from knockon.drafters.domino import DominoDrafter
from knockon.engine.assemble import width_policy
from knockon.engine.config import EngineConfig
from knockon.engine.engine import Engine
from knockon.engine.prompts import encode_prompt
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.width import AUTO, FixedWidth, WidthPolicy, auto_widths

HERE = Path(__file__).parent
PARTS = ("lossless", "ties", "speed")
TOGETHER = 8
# Requests of a speed measurement by how many are in flight.
SPEED_REQUESTS = {1: 4, 8: 16, 32: 32}


class CyclingWidth:
    """Another width at every step."""

    name = "cycling"

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(sorted(widths))
        self._step = 0

    def choose(self, batch: int, speculating: int) -> int:
        self._step += 1
        return self.widths[self._step % len(self.widths)]

    def record(self, batch: int, width: int, accept_lengths: Sequence[int], seconds: float) -> None:
        return


class Bench:
    """What the parts share: prompts, models by dtype."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args = args
        self.console = console
        rows = [json.loads(line) for line in args.prompts.read_text("utf-8").split("\n") if line]
        self.chats = [
            (row.get("workload", args.prompts.stem), [{"role": "user", "content": row["prompt"]}])
            for row in rows
        ]
        self.params = SamplingParams(temperature=0, max_tokens=args.new_tokens)

    @cache  # noqa: B019 - one bench a process
    def models(self, dtype: str) -> LoadedModels:
        """Both models; graphs and KV come with runners."""
        a = self.args
        return LoadedModels(
            EngineConfig(
                a.model,
                draft=a.draft,
                dtype=dtype,
                device=a.device,
                verify_width=AUTO,
                max_model_len=a.longest_prompt + a.new_tokens,
                max_batch_size=TOGETHER if dtype == "float32" else max(a.concurrency),
                prefix_cache=False,
            )
        )

    @cache  # noqa: B019
    def alone(self, dtype: str) -> BoundRunner:
        """The target without a drafter."""
        return self.models(dtype).runner(None, (1,))

    def target_engine(self, dtype: str) -> Engine:
        """A fresh engine of the target alone."""
        return self.models(dtype).engine(self.alone(dtype), FixedWidth(1))

    @cache  # noqa: B019
    def prompts(self) -> list[tuple[str, list[int]]]:
        """Workload and token ids of all that are short enough."""
        tokenizer = self.models("bfloat16" if "lossless" not in self.args.parts else "float32")
        encoded = [(name, encode_prompt(tokenizer.tokenizer, chat)) for name, chat in self.chats]
        return [(name, ids) for name, ids in encoded if len(ids) <= self.args.longest_prompt]

    def policies(self, models: LoadedModels, bound: BoundRunner) -> dict[str, WidthPolicy]:
        """Fixed widths, the adaptive one, and one that never stays."""
        found: dict[str, WidthPolicy] = {f"w{w}": FixedWidth(w) for w in self.args.widths}
        automatic = auto_widths(models.block_size)
        if set(automatic) <= set(bound.widths):
            found[AUTO] = width_policy(bound.config, automatic, bound.runner, models.target.group)
        found["cycling"] = CyclingWidth(bound.widths)
        return found

    def all_widths(self, models: LoadedModels) -> tuple[int, ...]:
        """What graphs are captured for."""
        return tuple(sorted({*self.args.widths, *auto_widths(models.block_size)}))


def lossless(bench: Bench) -> list[dict[str, Any]]:
    """FP32: drafters by width policy by batch, each held to the target alone."""
    args, models = bench.args, bench.models("float32")
    prompts = [ids for _, ids in bench.prompts()][: args.count]
    counts = {TOGETHER: len(prompts), 1: min(args.single, len(prompts))}
    alone = {
        batch: answer(bench.target_engine("float32"), prompts[:n], bench.params, batch)[0]
        for batch, n in counts.items()
    }
    rows = []
    domino = models.drafter
    assert isinstance(domino, DominoDrafter)
    # What `auto` adds is shown with one drafter: graphs of every width take their time.
    drafters = (
        ("domino", domino, bench.all_widths(models)),
        ("dflash", domino.backbone, tuple(sorted(args.widths))),
    )
    for kind, drafter, widths in drafters:
        bound = models.runner(drafter, widths)
        for name, policy in bench.policies(models, bound).items():
            for batch, count in counts.items():
                engine = models.engine(bound, policy)
                ours, seconds = answer(engine, prompts[:count], bench.params, batch)
                exact = bench.target_engine("float32")
                partings = part(ours, alone[batch], exact, exact)
                row = {
                    "drafter": kind,
                    "width": name,
                    "batch": batch,
                    "answers": count,
                    "identical": count - len(partings),
                    "tokens": sum(len(output.token_ids) for output in ours),
                    "accept_length": round(mean_accept_length(ours), 3),
                    "steps_by_width": engine.metrics().widths,
                    "seconds": round(seconds, 3),
                    "differences": [plain(each) for each in partings],
                }
                rows.append(row)
                bench.console.print(
                    f"FP32, {kind} {name}, batch {batch}: {row['identical']} of {count} identical, "
                    f"accept length {row['accept_length']:.2f}"
                )
        del bound, engine
        drafter.bind_kv(0)
        release()
    return rows


def ties(bench: Bench, bound: BoundRunner) -> list[dict[str, Any]]:
    """BF16: identical answers, and how near a tie every first difference was."""
    args, models = bench.args, bench.models("bfloat16")
    prompts = [ids for _, ids in bench.prompts()][: args.count]
    rows = []
    for batch, count in {TOGETHER: len(prompts), 1: min(args.single, len(prompts))}.items():
        alone, _ = answer(bench.target_engine("bfloat16"), prompts[:count], bench.params, batch)
        for name, policy in bench.policies(models, bound).items():
            ours, _ = answer(models.engine(bound, policy), prompts[:count], bench.params, batch)
            engines = (bench.target_engine("float32"), bench.target_engine("bfloat16"))
            partings = part(ours, alone, *engines)
            row = {
                "width": name,
                "batch": batch,
                "answers": count,
                "identical": count - len(partings),
                "near_ties": sum(each.near_tie for each in partings),
                "largest_margin": max((abs(each.margin) for each in partings), default=0.0),
                "differences": [plain(each) for each in partings],
            }
            rows.append(row)
            bench.console.print(
                f"BF16, domino {name}, batch {batch}: {row['identical']} of {count} identical; of "
                f"{len(partings)} differences {row['near_ties']} near ties, largest margin "
                f"{row['largest_margin']:.3f}"
            )
    return rows


def speed(bench: Bench, bound: BoundRunner) -> list[dict[str, Any]]:
    """BF16: tokens a second by workload, requests in flight and width."""
    args, models = bench.args, bench.models("bfloat16")
    engines = {"target": bench.target_engine("bfloat16")}
    policies = bench.policies(models, bound)
    del policies["cycling"]
    engines |= {name: models.engine(bound, policy) for name, policy in policies.items()}
    workloads: dict[str, list[list[int]]] = {}
    for name, ids in bench.prompts():
        workloads.setdefault(name, []).append(ids)
    everything = [ids for _, ids in bench.prompts()]
    for engine in engines.values():
        for concurrency in args.concurrency:
            some = list(islice(cycle(everything), concurrency))
            answer(engine, some, SamplingParams(temperature=0, max_tokens=8), concurrency)
    rows = []
    for workload, prompts in workloads.items():
        for concurrency in args.concurrency:
            count = SPEED_REQUESTS.get(concurrency, 2 * concurrency)
            asked = list(islice(cycle(prompts), count))
            row: dict[str, Any] = {"workload": workload, "concurrency": concurrency}
            for name, engine in engines.items():
                outputs, seconds = answer(engine, asked, bench.params, concurrency)
                tokens = sum(len(output.token_ids) for output in outputs)
                row[name] = {
                    "tokens_per_second": round(tokens / seconds, 1),
                    "accept_length": round(mean_accept_length(outputs), 3),
                    "tokens": tokens,
                }
            rows.append(row)
            bench.console.print(
                f"{workload}, {concurrency}: "
                + ", ".join(f"{name} {row[name]['tokens_per_second']:.0f}" for name in engines)
            )
    bench.console.print(speed_table(rows, list(engines)))
    return rows


def speed_table(rows: list[dict[str, Any]], names: list[str]) -> Table:
    """A row a workload and concurrency, and the mean of the ratios at the end of each."""
    fixed = [name for name in names if name not in ("target", AUTO)]
    table = Table(title="Output tokens a second (accept length), BF16", title_justify="left")
    table.add_column("workload")
    for heading in ("in flight", *names, "best fixed × target", "auto × target", "auto × best"):
        table.add_column(heading, justify="right")
    ratios: dict[int, list[tuple[float, float, float]]] = {}
    for row in rows:
        rate = {name: row[name]["tokens_per_second"] for name in names}
        best = max(rate[name] for name in fixed)
        found = (best / rate["target"], rate[AUTO] / rate["target"], rate[AUTO] / best)
        ratios.setdefault(row["concurrency"], []).append(found)
        cells = [
            f"{rate[name]:.0f}"
            + ("" if name == "target" else f" ({row[name]['accept_length']:.2f})")
            for name in names
        ]
        table.add_row(
            row["workload"], str(row["concurrency"]), *cells, *(f"{ratio:.2f}" for ratio in found)
        )
    for concurrency, all_found in ratios.items():
        means = [fmean(each) for each in zip(*all_found, strict=True)]
        blank = [""] * len(names)
        table.add_row("mean", str(concurrency), *blank, *(f"{mean:.3f}" for mean in means))
    return table


def plain(parting: Parting) -> dict[str, Any]:
    """For JSON."""
    found = asdict(parting) | {"near_tie": parting.near_tie}
    return {k: str(v) if v in (float("inf"), float("-inf")) else v for k, v in found.items()}


def release() -> None:
    """Give back what is no longer held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--prompts", type=Path, default=HERE / "prompts" / "questions.jsonl", help="JSON lines")
    add("--count", type=int, default=32, help="prompts that are compared, eight at a time")
    add("--single", type=int, default=8, help="of them, compared one at a time as well")
    add("--new-tokens", type=int, default=96)
    add("--widths", type=int, nargs="+", default=[2, 8, 16], help="fixed verify widths")
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="of the speed part")
    add("--longest-prompt", type=int, default=1024, help="tokens; longer prompts are left out")
    add("--model", default="smollm2-135m", help="catalogue name or path")
    add("--draft", default="smollm2-135m-domino", help="its Domino drafter")
    add("--device", default="auto")
    add("--out", type=Path, default=HERE / "results", help="folder of the JSON file")
    args = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    bench = Bench(args, console)
    result: dict[str, Any] = {
        "what": "the real model and its drafter: same tokens, near ties, speed",
        "environment": environment(),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
    }
    wrong = 0
    began = time.perf_counter()

    def note(part_name: str) -> None:
        nonlocal began
        now = time.perf_counter()
        result.setdefault("part_seconds", {})[part_name] = round(now - began, 1)
        console.print(f"{part_name}: {now - began:.1f} s")
        began = now

    if "lossless" in args.parts:
        result["lossless"] = lossless(bench)
        wrong += sum(row["answers"] - row["identical"] for row in result["lossless"])
        note("lossless")
    if "ties" in args.parts or "speed" in args.parts:
        models = bench.models("bfloat16")
        bound = models.runner(models.drafter, bench.all_widths(models))
        note("loading")
        if "ties" in args.parts:
            result["ties"] = ties(bench, bound)
            rows = result["ties"]
            wrong += sum(r["answers"] - r["identical"] - r["near_ties"] for r in rows)
            note("ties")
        if "speed" in args.parts:
            result["speed"] = speed(bench, bound)
            note("speed")
    args.out.mkdir(parents=True, exist_ok=True)
    device = bench.models("float32" if "lossless" in args.parts else "bfloat16").config.device
    out = args.out / f"real_model_{device}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"{wrong} unexplained differences; written to {out}")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
