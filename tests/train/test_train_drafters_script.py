"""The script of three drafters: same steps for DFlash as for Domino, pieces that fit together."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.benchmark_scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("train_drafters")


@pytest.fixture
def plan(script: ModuleType, tmp_path: Path) -> Callable[..., Any]:
    """A plan over a work folder, and the commands that it would run."""
    workload = tmp_path / "gsm8k.jsonl"
    workload.write_text('{"turns": ["How many?"]}\n')

    def make(*arguments: str) -> Any:
        words = [str(tmp_path / "work"), *arguments, "--workloads", str(workload)]
        made = script.Plan(script.parse(words))
        made.commands = []
        made.run = lambda *command, log=None: made.commands.append(command)
        return made

    return make


def train_json(plan: Any, steps: int) -> None:
    folder = plan.work / "domino"
    folder.mkdir(exist_ok=True)
    (folder / "train.json").write_text(json.dumps({"training steps": steps}))


def test_dflash_takes_the_steps_of_domino_unless_told_otherwise(plan: Callable[..., Any]) -> None:
    made = plan("dflash", "--domino-seconds", "30", "--set", "rate=5e-4", "--set", "mtp.steps=7")
    with pytest.raises(SystemExit, match="run the stage domino first"):
        made.settings("dflash")
    train_json(made, 123)
    assert made.settings("dflash").steps == 123
    assert made.settings("domino").minutes == 0.5 and made.settings("domino").steps is None
    assert made.settings("mtp").steps == 7
    assert made.settings("mtp").rate == made.settings("domino").rate == 5e-4
    assert made.settings("domino").workloads == ("workloads/gsm8k.jsonl",)
    assert (made.work / "workloads" / "gsm8k.jsonl").exists()
    told = plan("dflash", "--set", "dflash.steps=9")
    assert told.settings("dflash").steps == 9


def test_stages_run_in_order_and_not_twice(plan: Callable[..., Any]) -> None:
    made = plan("acceptance", "synthesis")
    made.carry_out()
    assert [command[0] for command in made.commands] == ["train", "bench"]
    (made.work / "data").mkdir()
    (made.work / "data" / "generate.json").write_text("{}")
    (made.work / "records" / "acceptance.json").write_text("{}")
    made.commands.clear()
    made.carry_out()
    assert not made.commands
    hasty = plan("lossless", "speed", "--limit", "100")
    hasty.carry_out()
    assert len(hasty.commands) == 1


def test_pieces_put_together_are_the_archive(plan: Callable[..., Any], tmp_path: Path) -> None:
    made = plan("pack", "--piece", "4000")
    (made.work / "records").mkdir()
    (made.work / "records" / "a.txt").write_bytes(bytes(range(256)) * 60)
    made.carry_out()
    pieces = sorted((made.work / "pack").glob("drafters.tar.*"))
    assert len(pieces) > 2 and all(piece.stat().st_size <= 4000 for piece in pieces)
    whole = tmp_path / "whole.tar"
    whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(whole) as archive:
        member = archive.extractfile("records/a.txt")
        assert member is not None and member.read() == bytes(range(256)) * 60


def test_a_setting_that_does_not_exist_is_refused(plan: Callable[..., Any]) -> None:
    with pytest.raises(SystemExit):
        plan("domino", "--set", "speed=1")
