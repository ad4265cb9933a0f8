"""The header of a GGUF file: metadata and where each tensor lies.

The ``gguf`` package's own reader makes a NumPy array of every token of the vocabulary, which takes
seconds; this one reads the same format (ggml ``docs/gguf.md``, versions 2 and 3) in a fraction of
one. Dequantisation is still that package's.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from knockon.errors import Refused

_MAGIC = b"GGUF"
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies.

    Attributes:
        shape: in PyTorch's order, slowest dimension first.
        offset, num_bytes: of its data in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata and tensors of a file, its bytes mapped read-only."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: np.ndarray[Any, np.dtype[np.uint8]]

    @property
    def architecture(self) -> str:
        """``general.architecture``."""
        return str(self.metadata.get("general.architecture"))


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, by its suffix or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def read_header(path: Path) -> GGUFHeader:
    """Map a file and read its header, once a process as long as the file stays as it is.

    Raises:
        Refused: no GGUF file, an unknown version, a doubled name, an unknown tensor type, a file
            that ends before its header or its data do.
    """
    found = path.stat()
    if found.st_size < 24:
        raise Refused(str(path), f"{found.st_size} bytes", "a whole GGUF file")
    stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    metadata, tensors = _parse(path, stamp)
    # Mapped anew each time: a mapping that were kept would hold all weights read through it.
    return GGUFHeader(path, metadata, tensors, np.memmap(path, dtype=np.uint8, mode="r"))


@functools.lru_cache(maxsize=4)  # a start asks for the target's half a dozen times
def _parse(path: Path, stamp: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    data = np.memmap(path, dtype=np.uint8, mode="r")
    if data[:4].tobytes() != _MAGIC:
        raise Refused(str(path), data[:4].tobytes(), "a GGUF file, which begins with b'GGUF'")
    cursor = _Cursor(memoryview(data.data), 4)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise Refused(f"{path}: GGUF version", version, "2 or 3, little-endian")
    try:
        return _read(path, data, cursor)
    except (
        struct.error,
        ValueError,
        IndexError,
        MemoryError,
        OverflowError,
        RecursionError,
    ) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(
            str(path),
            f"{data.size} bytes",
            "a whole GGUF file",
            f"Its header cannot be read ({error}): it is truncated or damaged.",
        ) from error


def _read(
    path: Path, data: np.ndarray[Any, Any], cursor: _Cursor
) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    tensor_count, entry_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.string()
        if key in metadata:
            raise Refused(f"{path}: metadata", key, "each key once")
        metadata[key] = cursor.value(cursor.scalar("I"))
    places = []
    for _ in range(tensor_count):
        name = cursor.string()
        shape = tuple(reversed(cursor.scalars("Q", cursor.scalar("I"))))
        places.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))

    if metadata.get("split.count", 1) not in (0, 1):
        raise Refused(
            f"{path}: split.count",
            metadata["split.count"],
            "1: a model in one file",
            "Merge the parts first (gguf-split --merge).",
        )
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise Refused(f"{path}: general.alignment", alignment, "a whole number, at least 1")
    start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, code, offset in places:
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise Refused(f"{path}: type of {name}", code, "a known GGML tensor type") from None
        block, size = GGML_QUANT_SIZES[kind]
        if name in tensors:
            raise Refused(f"{path}: tensor", name, "each name once")
        if not shape or shape[-1] % block:
            raise Refused(f"{path}: shape of {name}", shape, f"rows of whole {block}-value blocks")
        num_bytes = math.prod(shape) // block * size
        if start + offset + num_bytes > data.size:
            raise Refused(
                str(path),
                f"{data.size} bytes",
                f"at least {start + offset + num_bytes}, where {name} ends",
                "The file is truncated.",
            )
        tensors[name] = GGUFTensor(name, shape, kind, start + offset, num_bytes)
    return metadata, tensors


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: memoryview, offset: int) -> None:
        self.data = data
        self.offset = offset

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.data, self.offset)
        self.offset += struct.calcsize(layout)
        return values

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        (length,) = _LENGTH.unpack_from(self.data, self.offset)
        self.offset += _LENGTH.size
        text = self.data[self.offset : self.offset + length]
        if len(text) != length:
            raise IndexError("a string runs past the end")
        self.offset += length
        return str(text, "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if count > len(self.data):
                raise IndexError("an array runs past the end")
            if item in _SCALARS:
                return list(self.scalars(_SCALARS[item], count))
            if item == _STRING:
                return [self.string() for _ in range(count)]
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise IndexError(f"no metadata type {kind}")
        return self.scalar(_SCALARS[kind])
