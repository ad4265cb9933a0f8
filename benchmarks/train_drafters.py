"""Domino, DFlash and MTP drafters for one target from the same data, then how they compare.

    A="--prompts prompts.jsonl --workloads workloads/*.jsonl"
    PYTHONPATH=src python3 benchmarks/train_drafters.py WORK synthesis domino dflash $A
    PYTHONPATH=src python3 benchmarks/train_drafters.py WORK mtp acceptance speed pack $A

Stages: ``synthesis`` makes the data once; ``domino``, ``dflash`` and ``mtp`` train on it,
evaluate, export and plot, each by ``knockon train`` with a file of settings that is kept in WORK;
DFlash takes as many steps as Domino took. ``acceptance`` compares all of them by serving; ``speed``
measures one request at a time; ``lossless`` holds a few answers of every method to the target's in
FP32; ``pack`` cuts what is worth keeping into pieces: ``cat PIECES | tar x`` brings it back.

A stage that is done is skipped, one that was cut short goes on: run the same command again. With
--limit, no stage begins that would not end in time. The settings are those of
benchmarks/drafters/smollm2_KIND.yaml; ``--set rate=5e-4`` or ``--set mtp.start=random`` changes
them. Prompts and workloads are copied into WORK, where all commands run: its files name no others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import yaml

from knockon.train.config import KINDS, TrainConfig, read_train_config
from knockon.train.make_data import FACTS, SEQUENCES

ROOT = Path(__file__).resolve().parents[1]
MEASURES = ("acceptance", "speed", "lossless")
STAGES = ("synthesis", *KINDS, *MEASURES, "pack")
# Loading, evaluation, export and the plot, beside the seconds that are asked for.
_OVERHEAD = 45.0
_MEASURING = {"acceptance": 150.0, "speed": 90.0, "lossless": 150.0}


class Plan:
    """The stages over one work folder.

    Args:
        args: of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work: Path = args.work.resolve()
        self.begun = time.monotonic()
        self.prompts = self._copied([args.prompts] if args.prompts else [], "prompts")
        self.workloads = self._copied(args.workloads, "workloads")
        # Commands run in WORK, whatever these are relative to.
        self.environment = dict(os.environ)
        paths = [str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        paths = [str(Path(path).resolve()) for path in paths if path]
        self.environment["PYTHONPATH"] = os.pathsep.join(paths)
        if "KNOCKON_CACHE" in os.environ:
            self.environment["KNOCKON_CACHE"] = str(Path(os.environ["KNOCKON_CACHE"]).resolve())

    def _copied(self, files: list[Path], folder: str) -> list[str]:
        """Files, copied into a folder of WORK; their names there."""
        (self.work / folder).mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(file, self.work / folder)
        return [f"{folder}/{file.name}" for file in files]

    def drafter(self, kind: str) -> str:
        """Where a kind is exported to."""
        return f"drafters/smollm2-135m-{kind}"

    def settings(self, kind: str) -> TrainConfig:
        """Those of the repository, with what the command line changes."""
        args = self.args
        found = read_train_config(ROOT / "benchmarks" / "drafters" / f"smollm2_{kind}.yaml")
        changes: dict[str, Any] = {
            "target": args.target,
            "work": kind,
            "out": self.drafter(kind),
            "prompts": self.prompts[0] if self.prompts else None,
            "workloads": tuple(self.workloads),
            "limit": args.prompts_each,
            "save_every": 60.0,
            "generate_minutes": args.synthesis_seconds / 60,
        }
        asked = {name.removeprefix("dflash.") for name, _ in args.set}
        if kind == "dflash" and "steps" not in asked:
            done = self.work / "domino" / "train.json"
            if not done.exists():
                raise SystemExit(
                    "dflash takes as many steps as domino: run the stage domino first, "
                    "or say --set dflash.steps=N"
                )
            changes["steps"] = json.loads(done.read_text())["training steps"]
        elif kind != "dflash":
            seconds = args.domino_seconds if kind == "domino" else args.mtp_seconds
            changes |= {"minutes": seconds / 60, "steps": args.steps}
        for name, value in args.set:
            of, _, field = name.rpartition(".")
            if of in ("", kind):
                changes[field] = value
        return dataclasses.replace(found, **changes)

    def run(self, *command: str, log: str | None = None) -> None:
        """A command of the repository's own Knockon; its output is shown, and kept in a file."""
        whole = [sys.executable, "-u", "-m", "knockon", *command]
        print("$ knockon " + " ".join(command), flush=True)
        begun = time.monotonic()
        with subprocess.Popen(
            whole, env=self.environment, cwd=self.work, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            with (self.work / (log or "output.txt")).open("a" if log is None else "w") as file:
                for line in process.stdout:
                    print(line, end="", flush=True)
                    file.write(line)
        print(f"# {time.monotonic() - begun:.1f} s, exit status {process.returncode}", flush=True)
        if process.returncode:
            raise SystemExit(process.returncode)

    def train(self, kind: str, *stages: str) -> None:
        """Stages of `knockon train` with a kind's settings."""
        (self.work / f"{kind}.yaml").write_text(self.settings(kind).to_yaml())
        for stage in stages:
            self.run("train", "--config", f"{kind}.yaml", "--stage", stage)

    def synthesis(self) -> None:
        """The data, in a folder of its own."""
        config = dataclasses.replace(self.settings("domino"), work="data", out=None)
        (self.work / "synthesis.yaml").write_text(config.to_yaml())
        self.run("train", "--config", "synthesis.yaml", "--stage", "generate")

    def make(self, kind: str) -> None:
        """One drafter, from the data that all share."""
        folder = self.work / kind
        folder.mkdir(exist_ok=True)
        for name in (SEQUENCES, FACTS):
            if not (folder / name).exists():
                os.link(self.work / "data" / name, folder / name)
        self.train(kind, "all", "plot")
        for name in ("curve.png", "train.jsonl", "train.json", "accept.json", FACTS):
            if (folder / name).exists():
                record = self.work / "records" / kind
                record.mkdir(parents=True, exist_ok=True)
                shutil.copy(folder / name, record)

    def measure(self, stage: str) -> None:
        """`knockon bench acceptance` over the drafters that are there."""
        args = self.args
        drafters = [
            argument
            for kind in KINDS
            if (self.work / self.drafter(kind)).exists()
            for argument in (f"--{kind}", self.drafter(kind))
        ]
        chosen = {
            "acceptance": [
                "--limit",
                str(args.prompts_each),
                "--concurrency",
                str(args.concurrency),
            ],
            "speed": [
                *("--limit", "8", "--concurrency", "1"),
                *("--methods", "target,dflash-b16,domino-b8,domino-b16"),
            ],
            "lossless": [
                *("--limit", "2", "--concurrency", "8", "--max-tokens", "128"),
                *("--dtype", "float32"),
            ],
        }[stage]
        if stage != "lossless":
            chosen += ["--max-tokens", str(args.max_tokens)]
        if args.methods and stage != "speed":
            chosen += ["--methods", args.methods]
        (self.work / "records").mkdir(exist_ok=True)
        self.run(
            *("bench", "acceptance", args.target, *drafters, "--workloads", "workloads", *chosen),
            *("--json", f"records/{stage}.json", "--plot", f"records/{stage}.png"),
            log=f"records/{stage}.txt",
        )

    def pack(self) -> None:
        """Pieces of two archives: drafters and records; the data."""
        pieces = self.work / "pack"
        shutil.rmtree(pieces, ignore_errors=True)
        pieces.mkdir()
        settings = sorted(path.name for path in self.work.glob("*.yaml"))
        for name, members in (
            ("drafters", ["drafters", "records", *settings]),
            ("data", [f"data/{SEQUENCES}", f"data/{FACTS}"]),
        ):
            whole = self.work / f"{name}.tar"
            with tarfile.open(whole, "w") as archive:
                for member in members:
                    if (self.work / member).exists():
                        archive.add(self.work / member, member)
            self._cut(whole, pieces)
            whole.unlink()

    def _cut(self, whole: Path, pieces: Path) -> None:
        with whole.open("rb") as file:
            number = 0
            while part := file.read(self.args.piece):
                piece = pieces / f"{whole.name}.{number:02d}"
                piece.write_bytes(part)
                print(f"{piece}: {len(part)} bytes", flush=True)
                number += 1

    def done(self, stage: str) -> bool:
        """Whether a stage has left its result."""
        results = {"synthesis": self.work / "data" / FACTS}
        results |= {kind: self.work / "records" / kind / "curve.png" for kind in KINDS}
        results |= {name: self.work / "records" / f"{name}.json" for name in MEASURES}
        return stage in results and results[stage].exists()

    def seconds(self, stage: str) -> float:
        """How long it takes at most, about."""
        args = self.args
        asked = {
            "synthesis": args.synthesis_seconds,
            "domino": args.domino_seconds,
            "dflash": args.domino_seconds,
            "mtp": args.mtp_seconds,
            "pack": 10.0 - _OVERHEAD,
        }
        return _MEASURING[stage] if stage in _MEASURING else asked[stage] + _OVERHEAD

    def carry_out(self) -> None:
        """The stages asked for, in their order."""
        for stage in sorted(self.args.stages, key=STAGES.index):
            spent = time.monotonic() - self.begun
            if self.done(stage):
                print(f"{stage}: done before", flush=True)
                continue
            if spent and self.args.limit and spent + self.seconds(stage) > self.args.limit:
                print(f"{stage}: {self.seconds(stage):.0f} s would not fit; run it again")
                return
            if stage == "synthesis":
                self.synthesis()
            elif stage in KINDS:
                self.make(stage)
            elif stage == "pack":
                self.pack()
            else:
                self.measure(stage)
            print(f"{stage}: ended at {time.monotonic() - self.begun:.0f} s", flush=True)


def setting(text: str) -> tuple[str, Any]:
    """``KEY=VALUE`` or ``KIND.KEY=VALUE``."""
    name, equals, value = text.partition("=")
    field = name.rpartition(".")[2]
    fields = {field.name: str(field.type) for field in dataclasses.fields(TrainConfig)}
    if not equals or field not in fields:
        raise argparse.ArgumentTypeError(f"{text}: not KEY=VALUE of a known setting")
    found = yaml.safe_load(value)
    return name, float(found) if fields[field] == "float" else found


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("work", type=Path)
    add("stages", nargs="+", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    add("--target", default="smollm2-135m")
    add("--prompts", type=Path, help="JSON lines to answer besides self-written prompts")
    add("--workloads", type=Path, nargs="+", required=True, help="held-out JSON-lines files")
    add("--prompts-each", type=int, default=32, help="prompts of a workload that are measured")
    add("--methods", help="of `acceptance` and `lossless`, as knockon bench acceptance has it")
    add("--concurrency", type=int, default=32, help="requests in flight in `acceptance`")
    add("--max-tokens", type=int, default=256, help="of a measured answer")
    add("--synthesis-seconds", type=float, default=120.0)
    add("--domino-seconds", type=float, default=240.0)
    add("--mtp-seconds", type=float, default=100.0)
    add("--steps", type=int, help="steps of Domino and MTP instead of seconds")
    add("--set", type=setting, action="append", default=[], metavar="[KIND.]KEY=VALUE")
    add("--limit", type=float, help="seconds after which this command would be ended")
    add("--piece", type=int, default=15_000_000, help="bytes of a piece of `pack`")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    Plan(parse(sys.argv[1:])).carry_out()
