"""The drafters that methods are measured with, held to what they are before a server starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from knockon.bench.acceptance.methods import OWN, Checkpoints, drafter_block
from knockon.bench.matrix.methods import TARGET, ServedMethod, parse_method
from knockon.errors import Refused
from knockon.models.catalog import resolve

# Those of the published tables; the adaptive width is measured by name.
_BY_DEFAULT = {
    "mtp": ("mtp-s3", "mtp-s7", "mtp-s15"),
    "dflash": ("dflash-b8", "dflash-b16"),
    "domino": ("domino-b8", "domino-b16"),
}


def choose_methods(
    model: Path, checkpoints: Checkpoints, asked: Sequence[ServedMethod] | None
) -> tuple[tuple[ServedMethod, ...], dict[str, str | None]]:
    """The methods asked for, else those that the drafters given can do.

    Returns:
        Methods, and by kind each drafter's path, ``None`` for the target's own MTP head.

    Raises:
        Refused: a method whose drafter was not given, a drafter of another kind, a width above its
            block.
    """
    paths: dict[str, str | None] = {}
    blocks: dict[str, int | None] = {}
    for kind in _BY_DEFAULT:
        name = getattr(checkpoints, kind)
        if name is not None:
            own = name == OWN and kind == "mtp"
            path = model if own else resolve(name, f"--{kind}")
            blocks[kind] = drafter_block(kind, path)
            paths[kind] = None if own else str(path.absolute())
    if asked is None:
        names = [TARGET, *(n for kind in paths for n in _BY_DEFAULT[kind])]
        methods = [parse_method(name) for name in names]
        return tuple(m for m in methods if _fits(m, blocks)), paths
    for method in asked:
        if method.kind != TARGET and method.kind not in paths:
            raise Refused("methods", method.name, f"--{method.kind} PATH beside it, its drafter")
        if not _fits(method, blocks):
            block = blocks[method.kind]
            raise Refused("methods", method.name, f"a width up to the drafter's block size {block}")
    return tuple(asked), paths


def _fits(method: ServedMethod, blocks: dict[str, int | None]) -> bool:
    block = blocks.get(method.kind)
    return block is None or not isinstance(method.width, int) or method.width <= block
