"""What is compared: the target alone, and drafters at verify widths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from knockon.drafters.load import read_draft_config
from knockon.drafters.mtp_config import MTPConfig
from knockon.errors import Refused
from knockon.models.catalog import resolve

TARGET = "target"
OWN = "own"
DEFAULT_METHODS = (
    TARGET,
    *("mtp-s3", "mtp-s7", "mtp-s15"),
    *("dflash-b8", "dflash-b16"),
    *("domino-b8", "domino-b16"),
)
_NAME = re.compile(r"(mtp)-s(\d+)|(dflash|domino)-b(\d+)")
_KINDS = {"mtp": "MTP", "dflash": "DFlash", "domino": "Domino"}


@dataclass(frozen=True)
class Method:
    """One column of the tables.

    Attributes:
        name: as asked for, ``"domino-b8"``.
        kind: ``"target"``, ``"mtp"``, ``"dflash"`` or ``"domino"``.
        width: positions verified at a time; 1 for the target alone.
        draft: the drafter's path; ``None`` for the target alone and for its own MTP head.
    """

    name: str
    kind: str
    width: int
    draft: str | None

    @property
    def title(self) -> str:
        """As the published tables write it."""
        if self.kind == TARGET:
            return "target-only"
        short = f"-S{self.width - 1}" if self.kind == "mtp" else f" b{self.width}"
        return _KINDS[self.kind] + short


@dataclass(frozen=True)
class Checkpoints:
    """Drafters by kind, named as anywhere; ``mtp`` may be ``"own"``, the target's own head."""

    mtp: str | None = None
    dflash: str | None = None
    domino: str | None = None


def choose_methods(
    model: Path, checkpoints: Checkpoints, asked: Sequence[str] | None
) -> tuple[Method, ...]:
    """The methods asked for, or all that the checkpoints can do.

    Raises:
        Refused: an unknown method, one without a checkpoint, a checkpoint of another kind, a width
            above its block, the same method twice.
    """
    blocks: dict[str, int | None] = {}
    paths: dict[str, str | None] = {}
    for kind in _KINDS:
        name = getattr(checkpoints, kind)
        if name is None:
            continue
        path = model if name == OWN and kind == "mtp" else resolve(name, "draft")
        blocks[kind] = drafter_block(kind, path)
        paths[kind] = None if path == model else str(path)
    found = []
    for name in DEFAULT_METHODS if asked is None else asked:
        if name == TARGET:
            found.append(Method(name, TARGET, 1, None))
            continue
        match = _NAME.fullmatch(name)
        if match is None:
            raise Refused("methods", name, "target, mtp-sN, dflash-bN or domino-bN")
        kind = match[1] or match[3]
        width = int(match[2]) + 1 if match[1] else int(match[4])
        if kind not in paths:
            if asked is None:
                continue
            raise Refused("methods", name, f"--{kind}, a checkpoint to measure")
        block = blocks[kind]
        if width < 2 or (block is not None and width > block):
            if asked is None:
                continue
            raise Refused("methods", name, f"2 to the drafter's block size {block}")
        found.append(Method(name, kind, width, paths[kind]))
    names = [method.name for method in found]
    if len(set(names)) < len(names):
        raise Refused("methods", names, "each method once")
    return tuple(found)


def drafter_block(kind: str, path: Path) -> int | None:
    """A drafter's widest verification; ``None`` for an MTP head, which can be unrolled at will.

    Raises:
        Refused: a drafter of another kind.
    """
    config = read_draft_config(path)
    if isinstance(config, MTPConfig):
        is_kind = "mtp"
    else:
        is_kind = "dflash" if config.domino is None else "domino"
    if is_kind != kind:
        raise Refused(f"--{kind}", f"{path}, a drafter of kind {is_kind}", f"one of kind {kind}")
    return None if isinstance(config, MTPConfig) else config.block_size
