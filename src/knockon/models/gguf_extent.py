"""Whether a GGUF file is whole: how far its own tensor table says that it must reach.

A cut-off download still maps into memory and reads as zeros or as a crash much later; the table
at the front of the file tells at once. Layout: the GGUF specification of the ggml project,
versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from knockon.errors import Refused

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


def check_whole(path: Path) -> None:
    """Refuses ``path`` unless it is a GGUF file that holds all the bytes its tensor table names.

    Raises:
        Refused: no GGUF magic, another version, or fewer bytes than the tensors need.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        front = file.read(8)
        if front[:4] != _MAGIC:
            raise Refused(f"first bytes of {path}", front[:4], f"a GGUF file, {_MAGIC!r}")
        if len(front) < 8:
            raise Refused(f"size of {path}", size, "a whole GGUF file", "The file is cut off")
        version = struct.unpack("<I", front[4:])[0]
        if version not in _VERSIONS:
            raise Refused(f"GGUF version of {path}", version, f"one of {_VERSIONS}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            try:
                wanted = _Table(view).extent()
            except struct.error as error:
                raise Refused(
                    f"size of {path}", size, "a whole GGUF file", "It ends inside its own table"
                ) from error
    if size < wanted:
        raise Refused(
            f"size of {path}",
            size,
            f"at least {wanted} bytes",
            "The file is cut off: fetch it again",
        )


class _Table:
    """Walks metadata and tensor table; ``struct.error`` where the file ends before they do."""

    def __init__(self, view: mmap.mmap) -> None:
        self.view = view
        self.at = 8

    def extent(self) -> int:
        """Bytes from the start of the file to the end of its last tensor."""
        num_tensors, num_fields = self._take("Q"), self._take("Q")
        alignment = _DEFAULT_ALIGNMENT
        for _ in range(num_fields):
            key = self._string()
            kind = self._take("I")
            if key == b"general.alignment" and kind in _SCALARS:
                alignment = max(1, int(self._take(_SCALARS[kind])))
            else:
                self._skip(kind)
        end = 0
        for _ in range(num_tensors):
            self._string()
            elements = 1
            for _ in range(self._take("I")):
                elements *= self._take("Q")
            kind, offset = self._take("I"), self._take("Q")
            end = max(end, offset + _bytes_of(elements, kind))
        data = -(-self.at // alignment) * alignment
        return data + end

    def _take(self, code: str) -> int:
        if self.at > len(self.view):
            # A length read from the file points past its end, perhaps past what an index can hold.
            raise struct.error(f"offset {self.at} of {len(self.view)}")
        value = struct.unpack_from(f"<{code}", self.view, self.at)[0]
        self.at += struct.calcsize(f"<{code}")
        return int(value)

    def _string(self) -> bytes:
        length = self._take("Q")
        start, self.at = self.at, self.at + length
        # Most strings are the vocabulary's; only the short ones can be a key that matters here.
        return self.view[start : self.at] if length < 64 else b""

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            inner, count = self._take("I"), self._take("Q")
            if inner in _SCALARS:
                self.at += count * struct.calcsize(f"<{_SCALARS[inner]}")
            else:
                for _ in range(count):
                    self._skip(inner)
        elif kind in _SCALARS:
            self.at += struct.calcsize(f"<{_SCALARS[kind]}")
        else:
            raise struct.error(f"metadata type {kind}")


def _bytes_of(elements: int, kind: int) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (KeyError, ValueError) as error:
        known = ", ".join(t.name for t in GGML_QUANT_SIZES)
        raise Refused("GGUF tensor type", kind, f"one of {known}") from error
    return elements // block * block_bytes
