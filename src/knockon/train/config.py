"""What a drafter is made from and how: one YAML file, read strictly and kept with the result."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from knockon.errors import Refused
from knockon.train.settings import OPTIMIZERS

KINDS = ("domino", "dflash", "mtp")
STAGES = ("all", "generate", "train", "evaluate", "export", "plot")


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a run; a field of the YAML file each.

    Attributes:
        target: catalogue name, Hugging Face folder, GGUF file or hub id.
        work: folder that the stages share, and where an interrupted run goes on.
        out: folder for the exported drafter.
        kind: ``domino``, ``dflash`` or ``mtp``.
        name, license: the target's, for the model card.
        prompts: JSON lines of ``{"turns": [...]}`` to answer, or ``hub:org/dataset``; see
            :func:`~knockon.train.prompt_source.load_prompts`.
        self_written: whether the target also writes prompts, through its own chat template.
        sampled_temperatures: of further answers to each prompt of the file, one each.
        generate_minutes, slots, max_new: time for making data, sequences made at once (on a rank),
            cap on an answer.
        layers, block_size: of a block drafter. gru_size, correction_size: of a Domino head.
        target_layers: target layers that a block drafter reads; by default five, spread evenly.
        mask_id: token that stands for a masked position of a block.
        mtp_steps: proposals that an MTP head is unrolled for.
        start: ``"random"``; ``"target"`` for the target's last layers; or a drafter (catalogue
            name, folder or hub id) of the same sizes, whose training goes on.
        steps, minutes: length of training; ``steps`` where both are given.
        batch_size, anchors, optimizer, rate, gamma, lambda_start, lambda_end, soft, chunk: see
            :class:`~knockon.train.settings.TrainSettings`.
        compile: whether Inductor fuses a block drafter's backbone.
        save_every: seconds between checkpoints. log_every: steps between lines of the log.
        held_out, held_out_every: sequences that are not trained on (at most a twentieth), and steps
            between two replays of them.
        workloads: JSON-lines files of held-out prompts; no training prompt may be one of them.
        limit: prompts of each workload.
    """

    target: str
    work: str
    out: str | None = None
    kind: str = "domino"
    name: str | None = None
    license: str = "apache-2.0"
    prompts: str | None = None
    self_written: bool = True
    sampled_temperatures: tuple[float, ...] = (0.7, 1.0)
    generate_minutes: float = 8.0
    slots: int = 2048
    max_new: int = 192
    layers: int = 4
    block_size: int = 16
    target_layers: tuple[int, ...] | None = None
    mask_id: int | None = None
    gru_size: int = 256
    correction_size: int = 64
    mtp_steps: int = 7
    start: str = "random"
    steps: int | None = None
    minutes: float = 10.0
    batch_size: int = 64
    anchors: int = 24
    optimizer: str = "adamw"
    rate: float = 1e-3
    gamma: float = 7.0
    lambda_start: float = 1.0
    lambda_end: float = 0.3
    soft: float = 0.5
    chunk: int = 8192
    compile: bool = False
    save_every: float = 120.0
    log_every: int = 50
    held_out: int = 64
    held_out_every: int = 500
    workloads: tuple[str, ...] = ()
    limit: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for field, known in (("kind", KINDS), ("optimizer", OPTIMIZERS)):
            if getattr(self, field) not in known:
                raise Refused(field, getattr(self, field), f"one of {', '.join(known)}")
        if self.kind != "mtp" and self.mask_id is None:
            raise Refused("mask_id", None, "a token id that no text of the target holds")
        if self.prompts is None and not self.self_written:
            raise Refused("prompts", None, "a file where self_written is false")
        for field in _COUNTS:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise Refused(field, value, "at least 1")
        if self.held_out < 0:
            raise Refused("held_out", self.held_out, "0 or more")

    def to_yaml(self) -> str:
        """The file that reads back as this."""
        fields = dataclasses.asdict(self)
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
        text: str = yaml.safe_dump(plain, sort_keys=False)
        return text


_COUNTS = (
    *("slots", "max_new", "layers", "gru_size", "correction_size", "mtp_steps", "steps"),
    *("batch_size", "anchors", "chunk", "log_every", "held_out_every", "limit"),
)


def read_train_config(path: Path) -> TrainConfig:
    """Read a YAML file.

    Raises:
        Refused: no such file, no mapping, an unknown or missing field, a value of another type.
    """
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise Refused("--config", str(path), f"a readable YAML file ({reason})") from None
    if not isinstance(found, dict):
        raise Refused("--config", str(path), "a YAML mapping of settings")
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    for name in found:
        if name not in fields:
            raise Refused(f"{path}: setting", name, f"one of {', '.join(fields)}")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in found:
            raise Refused(f"{path}: {name}", None, "a value")
    return TrainConfig(**{k: _typed(path, k, str(fields[k].type), v) for k, v in found.items()})


def _typed(path: Path, name: str, kind: str, value: Any) -> Any:
    """``value`` as the field's annotation wants it."""
    if value is None and "None" in kind:
        return None
    kind = kind.removesuffix(" | None")
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind == "float" and (whole or isinstance(value, float)):
        return float(value)
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and whole:
        return value
    if kind.startswith("tuple") and isinstance(value, list):
        wanted: tuple[type, ...] = (int,) if "int" in kind else (str,)
        wanted = (int, float) if "float" in kind else wanted
        if all(type(each) in wanted for each in value):
            return tuple(map(float, value)) if "float" in kind else tuple(value)
    # YAML 1.1 reads 1e-3 as text; nothing else but a number can be meant.
    if kind == "float" and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    raise Refused(f"{path}: {name}", value, f"of type {kind}")


def spread_layers(count: int, most: int = 5) -> tuple[int, ...]:
    """Target layers to read, as published drafters choose them: from 1 to ``count - 3``, evenly."""
    first, last = min(1, max(count - 2, 0)), max(count - 3, 0)
    if last <= first:
        return tuple(range(max(1, count - 1)))
    steps = most - 1
    return tuple(sorted({first + round(i * (last - first) / steps) for i in range(most)}))
