"""``knockon train`` end to end: synthesis, training, export, serving; killed and taken up again."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
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
from knockon.train.export import export
from knockon.train.loop import Trainer
from knockon.train.make_data import gather
from knockon.train.overlap import HeldOutPrompts
from knockon.train.run import Pipeline
from knockon.train.sequences import PackedSequences
from knockon.train.synthesize import Recipe

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


def curve(config: TrainConfig) -> list[dict[str, float]]:
    lines = (Path(config.work) / "train.jsonl").read_text().splitlines()
    clock = ("seconds", "tokens_per_second")
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def test_a_killed_run_goes_on_to_the_same_curve(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = settings(model, tmp_path, steps=20, log_every=2, save_every=0.0)
    carry_out(whole, "generate")
    carry_out(whole, "train")
    broken = dataclasses.replace(whole, work=str(tmp_path / "broken"))
    Path(broken.work).mkdir()
    made = Path(whole.work) / "sequences.safetensors"
    shutil.copy(made, broken.work)
    step, save = Trainer.step, Trainer.checkpoint

    def dies(self: Trainer) -> Any:
        if self.step_number == 13:
            raise KeyboardInterrupt
        return step(self)

    def rarely(self: Trainer, path: Path) -> None:
        if self.step_number in (9, 20):
            save(self, path)

    monkeypatch.setattr(Trainer, "step", dies)
    monkeypatch.setattr(Trainer, "checkpoint", rarely)
    with pytest.raises(KeyboardInterrupt):
        carry_out(broken, "train")
    assert len(curve(broken)) == 6
    with (Path(broken.work) / "train.jsonl").open("a") as log:
        log.write('{"step": 1')  # cut short
    monkeypatch.setattr(Trainer, "step", step)
    carry_out(broken, "train")
    assert curve(broken) == curve(whole)
    assert len(curve(whole)) == 10


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
    file = Path(config.work) / "sequences.safetensors"
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
