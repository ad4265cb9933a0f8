"""``knockon train`` end to end: synthesis, training, export, serving; killed and taken up again."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.generation import GREEDY, generate, mean_accept_length, target_only, tokens
from tests.tiny_models import TinyTarget
from tests.tiny_tokenizer import MASK
from typer.testing import CliRunner

from knockon.cli.app import app
from knockon.errors import Refused
from knockon.train.command import carry_out
from knockon.train.config import TrainConfig, read_train_config, spread_layers
from knockon.train.evaluate import HeldOut, accept_lengths
from knockon.train.export import export
from knockon.train.make_data import SEQUENCES, gather
from knockon.train.overlap import HeldOutPrompts
from knockon.train.run import Pipeline
from knockon.train.sequences import PackedSequences
from knockon.train.synthesize import Recipe
from knockon.train.warm_start import start_from

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "drafters"
WORDS = (
    *("the", "heron", "eats", "one", "red", "stone", "then", "rain"),
    *("ran", "into", "a", "tired", "nest", "on", "the", "island"),
)


def write_prompts(file: Path, count: int, seed: int) -> Path:
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=5)) for _ in range(count)]
    file.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyTarget(wander=0.9).save(tmp_path_factory.mktemp("target"))


def settings(model: Path, folder: Path, **changes: Any) -> TrainConfig:
    asked = {
        "target": str(model),
        "work": str(folder / "work"),
        "out": str(folder / "out"),
        "prompts": str(write_prompts(folder / "prompts.jsonl", 48, 1)),
        "self_written": False,
        "generate_minutes": 1.0,
        "slots": 48,
        "max_new": 40,
        "layers": 2,
        "block_size": 6,
        "mask_id": MASK,
        "gru_size": 24,
        "correction_size": 24,
        "mtp_steps": 5,
        "steps": 60,
        "batch_size": 16,
        "anchors": 12,
        "rate": 4e-3,
        "log_every": 5,
        "chunk": 2048,
    }
    return TrainConfig(**asked | changes)


@pytest.mark.parametrize("kind", ["domino", "dflash", "mtp"])
def test_a_trained_drafter_beats_an_untrained_one_when_served(
    model: Path, tmp_path: Path, kind: str
) -> None:
    config = settings(model, tmp_path, kind=kind)
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    result = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "run.yaml")])
    assert result.exit_code == 0, result.output
    assert "kind: " + kind in result.output
    assert read_train_config(tmp_path / "out" / "train.yaml") == config
    pipeline = Pipeline(config)
    export(pipeline.build(), pipeline.draft_config(), tmp_path / "untrained", "")
    held_out = write_prompts(tmp_path / "held.jsonl", 6, 2).read_text().splitlines()
    chats = [pipeline.chat.encode(json.loads(line)["turns"])[0] for line in held_out]
    served = {
        name: generate(model, tmp_path / name, chats, GREEDY, verify_width=6)
        for name in ("out", "untrained")
    }
    for outputs in served.values():
        assert tokens(outputs) == tokens(target_only(model, chats))
    trained, untrained = (mean_accept_length(outputs) for outputs in served.values())
    assert trained > untrained + 1.0, (trained, untrained)

    # What evaluation counts by replay is what serving accepted.
    module = pipeline.build()
    start_from(module, tmp_path / "out", pipeline.target.config)
    answers = [(chat, o.token_ids) for chat, o in zip(chats, served["out"], strict=True)]
    replayed = accept_lengths(module, pipeline.target, [HeldOut("served", answers)], (6,))
    assert replayed["mean"]["6"] == pytest.approx(trained, rel=1e-6)


def curve(config: TrainConfig) -> list[dict[str, float]]:
    lines = (Path(config.work) / "train.jsonl").read_text().splitlines()
    clock = ("seconds", "tokens_per_second")
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def run_command(*arguments: str, ranks: int = 1) -> subprocess.Popen[str]:
    """``knockon train`` in processes of its own."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    path = os.pathsep.join(sys.path)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *(launcher if ranks > 1 else ()), "-m", "knockon", "train", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def write_config(config: TrainConfig, file: Path) -> str:
    file.write_text(config.to_yaml())
    return str(file)


def with_data_of(other: TrainConfig, work: Path, **changes: Any) -> TrainConfig:
    work.mkdir()
    shutil.copy(Path(other.work) / SEQUENCES, work)
    return dataclasses.replace(other, work=str(work), **changes)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of 20 steps that nothing broke, and its data."""
    folder = tmp_path_factory.mktemp("whole")
    found = settings(
        model, folder, steps=20, log_every=2, layers=1, block_size=4, anchors=6, held_out_every=10
    )
    carry_out(found, "generate")
    carry_out(found, "train")
    return found


def test_a_killed_run_goes_on_to_the_same_curve(whole: TrainConfig, tmp_path: Path) -> None:
    broken = with_data_of(whole, tmp_path / "broken", save_every=0.0)
    log = Path(broken.work) / "train.jsonl"
    file = write_config(broken, tmp_path / "broken.yaml")
    with run_command("--config", file, "--stage", "train") as process:
        until = time.monotonic() + 120
        while not log.exists() or len(log.read_text().splitlines()) < 3:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    reached = torch.load(Path(broken.work) / "checkpoint.pt", weights_only=True)["step"]
    assert 0 < reached < 20
    with log.open("a") as lines:
        lines.write('{"step": 1')  # cut short
    carry_out(broken, "train")
    assert curve(broken) == curve(whole)
    assert len(curve(whole)) == 10
    assert [line["step"] for line in curve(whole) if "held_out_accept" in line] == [10, 20]


def test_two_ranks_take_the_steps_of_one(whole: TrainConfig, tmp_path: Path) -> None:
    """Data by both ranks, each with its share; then the same batches, the same curve."""
    shared = dataclasses.replace(whole, work=str(tmp_path / "made"))
    file = write_config(shared, tmp_path / "made.yaml")
    with run_command("--config", file, "--stage", "generate", ranks=2) as process:
        output = process.communicate(timeout=240)[0]
        assert process.returncode == 0, output
    made = PackedSequences.load(Path(shared.work) / SEQUENCES)
    assert made.prompts() == PackedSequences.load(Path(whole.work) / SEQUENCES).prompts()
    assert [path.name for path in Path(shared.work).glob("sequences*")] == [SEQUENCES]

    config = with_data_of(whole, tmp_path / "trained")
    file = write_config(config, tmp_path / "trained.yaml")
    with run_command("--config", file, "--stage", "train", ranks=2) as process:
        output = process.communicate(timeout=240)[0]
        assert process.returncode == 0, output
    one, two = curve(whole), curve(config)
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for ours, theirs in zip(two, one, strict=True):
        for name in ("loss", "base", "final", "rate"):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3), name
    assert json.loads((Path(config.work) / "train.json").read_text())["ranks"] == 2


def test_killed_synthesis_goes_on_with_what_is_missing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(model, tmp_path, save_every=0.0, slots=16)
    finished, calls = Recipe.finished, 0

    def dies(self: Recipe, done: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        finished(self, done)

    monkeypatch.setattr(Recipe, "finished", dies)
    with pytest.raises(KeyboardInterrupt):
        carry_out(config, "generate")
    file = Path(config.work) / SEQUENCES
    first = gather(Path(config.work))
    assert first is not None
    assert 0 < len(first.prompts()) < 48
    monkeypatch.setattr(Recipe, "finished", finished)
    carry_out(config, "generate")
    both = PackedSequences.load(file)
    assert torch.equal(both.tokens[: len(first.tokens)], first.tokens)
    assert len(both.prompts()) == len(open_prompts(config))
    carry_out(config, "generate")
    assert len(PackedSequences.load(file)) == len(both)


def open_prompts(config: TrainConfig) -> set[str]:
    assert config.prompts is not None
    return set(Path(config.prompts).read_text().splitlines())


def test_held_out_prompts_are_not_trained_on(model: Path, tmp_path: Path) -> None:
    config = settings(model, tmp_path, workloads=(str(tmp_path / "prompts.jsonl"),))
    with pytest.raises(Refused, match="sequences: found 0"):
        carry_out(config, "generate")
    held = HeldOutPrompts(["How many pears does Ann have after she eats two of her nine pears?"])
    assert held.overlaps("how many pears does Ann have, after she eats two of her nine pears")
    assert held.overlaps("Say: how many pears does Ann have after she eats two of her nine pears?")
    assert not held.overlaps("How many pears does a tree bear in a year of little rain, and why?")
    assert not held.overlaps("Pears")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target: a\nwork: b\nmask_id: 1\nlayer: 3\n", "setting: found 'layer'"),
        ("work: b\nmask_id: 1\n", "target: found None"),
        ("target: a\nwork: b\n", "mask_id: found None"),
        ("target: a\nwork: b\nmask_id: x\n", "mask_id: found 'x', wanted of type int"),
        ("target: a\nwork: b\nkind: eagle\n", "kind: found 'eagle'"),
        ("target: a\nwork: b\nmask_id: 1\nsteps: 0\n", "steps: found 0"),
        ("target: a\nwork: b\nmask_id: 1\nself_written: false\n", "prompts: found None"),
        ("- a\n", "a YAML mapping"),
        ("a: [\n", "a readable YAML file"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(Refused, match=message):
        read_train_config(tmp_path / "c.yaml")


def test_a_config_reads_back_as_it_was_written(tmp_path: Path) -> None:
    config = TrainConfig("a", "b", mask_id=3, rate=1e-3, target_layers=(1, 2), workloads=("c",))
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert read_train_config(tmp_path / "c.yaml") == config


def test_layers_are_spread_as_published_drafters_have_them() -> None:
    assert spread_layers(36) == (1, 9, 17, 25, 33)
    assert spread_layers(64) == (1, 16, 31, 46, 61)
    for count in range(2, 40):
        found = spread_layers(count)
        assert len(set(found)) == len(found) and 0 <= min(found) <= max(found) < count - 1


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_configurations_in_the_repository_can_be_read(file: Path) -> None:
    assert file.stem.endswith(read_train_config(file).kind)
