"""Weights of a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from knockon.errors import Refused
from knockon.models.json_file import read_json_object

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsFolder:
    """Tensors of a folder's safetensors files, mapped and read lazily.

    ``model.safetensors`` comes first, then the files of ``model.safetensors.index.json``, then
    whatever safetensors files there are.

    Raises:
        Refused: no weights, a file missing, truncated or damaged, a name in two files, an index
            that disagrees with its files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index = _read_index(self.path)
        self._files: dict[Path, Any] = {}
        self._home: dict[str, Path] = {}
        for file in _weight_files(self.path, index):
            self._files[file] = _open(file)
            for name in self._files[file].keys():  # noqa: SIM118 - not a dict: it has no __iter__
                if name in self._home:
                    raise Refused(
                        f"{self.path}: tensor {name}",
                        f"in {self._home[name].name} and {file.name}",
                        "each name in one file",
                    )
                self._home[name] = file
        if index is not None:
            _check_index(self.path, index, self._home)

    def names(self) -> set[str]:
        """Every tensor's name, as the checkpoint spells it."""
        return set(self._home)

    def get(self, name: str) -> Tensor:
        """The full tensor in the checkpoint's dtype, on the CPU."""
        tensor: Tensor = self._files[self._home[name]].get_tensor(name)
        return tensor

    def describe(self) -> str:
        """What this is, for messages."""
        return f"{self.path} ({len(self._files)} safetensors files)"


def _read_index(path: Path) -> dict[str, str] | None:
    """``weight_map`` of the index, where a single file does not take precedence over it."""
    index = path / _INDEX
    if (path / _SINGLE).is_file() or not index.is_file():
        return None
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise Refused(f"{index}: weight_map", weight_map, "names and files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or "/" in file or "\0" in file:
            raise Refused(f"{index}: weight_map[{name!r}]", file, "the name of a file beside it")
    return weight_map


def _weight_files(path: Path, index: dict[str, str] | None) -> list[Path]:
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if index is not None:
        files = [path / name for name in sorted(set(index.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise Refused(f"{path / _INDEX}: files missing", missing, "every file of the index")
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = sorted(file.name for file in path.glob("*.bin"))
        hint = f"Convert {pickled[0]} to safetensors first." if pickled else ""
        raise Refused(str(path), "no *.safetensors file", "weights as safetensors", hint)
    return files


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise Refused(
            str(file),
            f"{file.stat().st_size} bytes",
            "a whole safetensors file",
            f"It is truncated or damaged ({error}).",
        ) from error


def _check_index(path: Path, index: dict[str, str], home: dict[str, Path]) -> None:
    misplaced = sorted(
        name for name, file in index.items() if name not in home or home[name].name != file
    )
    unlisted = sorted(home.keys() - index.keys())
    if misplaced or unlisted:
        raise Refused(
            f"{path / _INDEX}: weight_map",
            f"not in the file named: {misplaced[:5]}; not listed: {unlisted[:5]}",
            "each tensor listed with its file",
        )
