"""Methods are known by their names, and servers are told no more than they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from knockon.bench.acceptance.methods import Checkpoints
from knockon.bench.matrix.drafters import choose_methods
from knockon.bench.matrix.measure import passed_on
from knockon.bench.matrix.methods import parse_method, parse_methods
from knockon.errors import Refused
from tests.engine.conftest import tiny as tiny
from tests.engine.generation import TinyShelf
from tests.tiny_models import TinyDrafter

DRAFT = ["--speculative-draft-model-path", "/d"]


@pytest.mark.parametrize(
    ("name", "title", "arguments"),
    [
        ("target", "target-only", []),
        (
            "mtp-s7",
            "MTP-S7",
            [*DRAFT, "--speculative-algorithm", "MTP", "--speculative-num-steps", "7"],
        ),
        ("mtp", "MTP", [*DRAFT, "--speculative-algorithm", "MTP"]),
        ("dflash-b8", "DFlash b8", [*DRAFT, "--speculative-num-draft-tokens", "8"]),
        ("domino-b16", "Domino b16", [*DRAFT, "--speculative-num-draft-tokens", "16"]),
        ("domino", "Domino", DRAFT),
        ("domino-auto", "Domino auto", [*DRAFT, "--verify-width", "auto"]),
    ],
)
def test_a_name_says_what_the_server_is_told(name: str, title: str, arguments: list[str]) -> None:
    method = parse_method(name)
    assert method.title == title
    assert method.serve_arguments("/d") == arguments


def test_a_targets_own_head_has_no_path() -> None:
    told = ["--speculative-algorithm", "MTP", "--speculative-num-steps", "3"]
    assert parse_method("mtp-s3").serve_arguments(None) == told


@pytest.mark.parametrize(
    "name",
    ["", "target-b8", "domino-s3", "mtp-b8", "domino-b0", "domino-b08", "domino-b1", "eagle", "b8"],
)
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="methods: found"):
        parse_method(name)


def test_a_method_twice_is_refused() -> None:
    with pytest.raises(Refused, match="each method once"):
        parse_methods(["target", "target"])


def test_arguments_of_speculation_are_kept_from_the_target_alone() -> None:
    given = ("--tp-size", "2", "--speculative-draft-head-dtype", "fp8", "--dtype=bfloat16")
    assert passed_on(given, True) == list(given)
    assert passed_on(given, False) == ["--tp-size", "2", "--dtype=bfloat16"]


def test_methods_without_a_drafter_or_beyond_its_block_are_refused_by_name(
    tiny: TinyShelf,
) -> None:
    model = tiny.target()
    short = str(tiny.drafter(TinyDrafter(block_size=8)))

    def choose(names: list[str] | None, given: Checkpoints) -> list[str]:
        asked = None if names is None else parse_methods(names)
        return [method.name for method in choose_methods(model, given, asked)[0]]

    with pytest.raises(Refused, match=r"methods: found 'mtp-s3', wanted --mtp PATH"):
        choose(["target", "mtp-s3"], Checkpoints(domino=short))
    with pytest.raises(Refused, match=r"'domino-b16'.*block size 8"):
        choose(["domino-b16"], Checkpoints(domino=short))
    with pytest.raises(Refused, match="--dflash: found"):
        choose(["dflash-b8"], Checkpoints(dflash=short))
    assert choose(["domino-b8", "domino-auto"], Checkpoints(domino=short)) == [
        "domino-b8",
        "domino-auto",
    ]
    assert choose(None, Checkpoints(domino=short)) == ["target", "domino-b8"]
    assert choose(None, Checkpoints()) == ["target"]


def test_drafters_are_named_by_whole_paths(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.drafter("domino")
    monkeypatch.chdir(path.parent)
    _, paths = choose_methods(tiny.target(), Checkpoints(domino=path.name), None)
    assert paths == {"domino": str(Path(path).absolute())}
