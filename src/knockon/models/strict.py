"""Strict loading: every weight wanted is found exactly once, and every weight found is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from knockon.errors import Refused
from knockon.models.weights import WeightSource

Loader = Callable[[Tensor], None]


def load_strictly(
    source: WeightSource,
    loaders: dict[str, Loader],
    optional: Iterable[str] = (),
    prefixes: tuple[str, ...] = ("model.",),
    ignored_suffixes: tuple[str, ...] = (),
    ignored_prefixes: tuple[str, ...] = (),
) -> None:
    """Hand every tensor of ``source`` to its loader, one at a time.

    Args:
        loaders: what to do with each tensor, by name.
        optional: names of ``loaders`` that the source may lack.
        prefixes: leading parts that publishers write or leave out; names that differ only in them
            are the same weight, and must occur under one spelling.
        ignored_suffixes: endings of names that are no weights (tables that can be recomputed).
        ignored_prefixes: beginnings of names, bare of ``prefixes``, that are another's weights.

    Raises:
        Refused: names missing, unused or doubled; a loader's refusal, under the weight's name.
            Nothing is loaded unless all names fit.
    """
    wanted = {_bare(name, prefixes): name for name in loaders}
    spelling: dict[str, str] = {}
    for name in sorted(source.names()):
        if name.endswith(ignored_suffixes):
            continue
        bare = _bare(name, prefixes)
        if bare.startswith(ignored_prefixes):
            continue
        if bare in spelling:
            raise Refused(
                f"{source.describe()}: weight {wanted.get(bare, bare)}",
                f"under two names, {spelling[bare]!r} and {name!r}",
                "each weight once",
            )
        spelling[bare] = name
    may_lack = {_bare(name, prefixes) for name in optional}
    missing = sorted(wanted[bare] for bare in wanted.keys() - spelling.keys() - may_lack)
    if missing:
        raise Refused(f"{source.describe()}: weights missing", _some(missing), "all weights")
    unused = sorted(spelling[bare] for bare in spelling.keys() - wanted.keys())
    if unused:
        raise Refused(
            f"{source.describe()}: weights without a use",
            _some(unused),
            "only the weights of this architecture and configuration",
        )
    for bare, name in wanted.items():
        if bare in spelling:
            try:
                loaders[name](source.get(spelling[bare]))
            except Refused as error:
                field = f"{source.describe()}: weight {spelling[bare]}: {error.field}"
                raise Refused(field, error.found, error.wanted) from error


def _bare(name: str, prefixes: tuple[str, ...]) -> str:
    """The name without its leading container parts, however many are stacked."""
    for prefix in prefixes:
        if name.startswith(prefix):
            return _bare(name.removeprefix(prefix), prefixes)
    return name


def _some(names: list[str], most: int = 5) -> list[str]:
    rest = len(names) - most
    return names if rest <= 0 else [*names[:most], f"and {rest} more"]
