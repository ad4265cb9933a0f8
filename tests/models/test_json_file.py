"""A publisher's JSON file is an object or refused by name, however damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from knockon.errors import Refused
from knockon.models.json_file import read_json_object

DAMAGED = {
    "nothing": b"",
    "cut": b'{"a": 1',
    "a list": b"[]",
    "a number": b"5",
    "no UTF-8": b"\xff\xfe{}",
    "nested without end": b"[" * 100_000,
    "a number beyond reading": b'{"a": ' + b"1" * 5000 + b"}",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_anything_but_an_object_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(DAMAGED[name])
    with pytest.raises(Refused, match=r"config\.json: found"):
        read_json_object(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"config\.json: found .*No such file"):
        read_json_object(tmp_path / "config.json")


def test_an_object_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": "ü"}', "utf-8")
    assert read_json_object(file) == {"a": "ü"}
