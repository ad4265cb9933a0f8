"""Model folders of the Hugging Face hub: the local cache first, then the network."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from knockon.errors import Refused

# Weights as safetensors only, and nothing from subfolders, where repositories keep copies in
# other formats.
_ALLOWED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_IGNORED = ["*/*"]
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_repo_id(name: str) -> bool:
    """Whether ``name`` has the form ``organisation/model``."""
    return _REPO_ID.fullmatch(name) is not None


def snapshot(repo_id: str) -> Path:
    """The folder of a hub repository, from the local cache if it is whole there.

    Raises:
        Refused: not in the cache and not to be had from the hub, with the hub's reason; or the
            repository has no safetensors weights.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError):
        cached = Path(
            snapshot_download(
                repo_id, allow_patterns=_ALLOWED, ignore_patterns=_IGNORED, local_files_only=True
            )
        )
        if not missing_files(cached):
            return cached
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=_ALLOWED, ignore_patterns=_IGNORED))
    except Exception as error:
        # The hub client lets errors of several libraries through (HTTP, DNS, TLS, files).
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise Refused(
            f"hub repository {repo_id}",
            f"{type(error).__name__}: {reason[0]}",
            "a repository that the hub or the local hub cache holds",
            "With no network, name a local folder or a model of `knockon models list`",
        ) from error
    if missing := missing_files(folder):
        raise Refused(f"hub repository {repo_id}", "no " + ", ".join(missing), "those files")
    return folder


def missing_files(folder: Path) -> list[str]:
    """What a model folder lacks of its configuration and safetensors weights, by file name."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing += [shard for shard in shards if not (folder / shard).is_file()]
    elif not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return missing
