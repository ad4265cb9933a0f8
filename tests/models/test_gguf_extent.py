from __future__ import annotations

import struct

import pytest

from knockon.errors import Refused
from knockon.models.gguf_extent import check_whole
from tests.models.fake_index import write_gguf


def test_a_whole_file_passes(tmp_path):
    check_whole(write_gguf(tmp_path / "whole.gguf"))


# The writer pads the last tensor (64 bytes) to the alignment of 32, so cutting a byte cuts data.
@pytest.mark.parametrize("keep", [-1, -100, 300, 24, 10, 6])
def test_a_file_cut_anywhere_is_refused(tmp_path, keep):
    path = write_gguf(tmp_path / "cut.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(Refused, match=r"size of .*cut\.gguf"):
        check_whole(path)


@pytest.mark.parametrize("front", [b"", b"GGU", b"PK\x03\x04 a zip", b"\x00" * 64])
def test_another_kind_of_file_is_refused(tmp_path, front):
    path = tmp_path / "other.gguf"
    path.write_bytes(front)
    with pytest.raises(Refused, match="GGUF"):
        check_whole(path)


def test_an_unknown_version_is_refused_by_number(tmp_path):
    path = tmp_path / "future.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 99) + b"\x00" * 64)
    with pytest.raises(Refused, match="99"):
        check_whole(path)


def test_counts_that_no_file_could_hold_are_refused(tmp_path):
    path = tmp_path / "absurd.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + b"\xff" * 64)
    with pytest.raises(Refused):
        check_whole(path)


@pytest.mark.slow
def test_the_real_model_is_whole(smollm2_path):
    check_whole(smollm2_path)
