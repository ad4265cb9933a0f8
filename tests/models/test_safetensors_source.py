"""Folders of safetensors: one file or many, whole or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from knockon.errors import Refused
from knockon.models.safetensors_source import SafetensorsFolder
from knockon.models.target import load_target
from knockon.parallel import SingleRank
from tests.models.tiny_targets import CASES, make_reference, relative_error, run_chunks


def write_sharded(path: Path) -> list[Path]:
    """A tiny model over several files."""
    make_reference(*CASES["qwen3"]).save_pretrained(path, max_shard_size="30KB")
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 2
    return shards


def test_a_sharded_folder_equals_a_single_file(tmp_path: Path) -> None:
    write_sharded(tmp_path / "sharded")
    make_reference(*CASES["qwen3"]).save_pretrained(tmp_path / "single")
    ids = torch.randint(0, 101, (1, 5))
    models = [
        load_target(tmp_path / name, torch.float32, SingleRank()) for name in ("sharded", "single")
    ]
    outs = [model.logits(run_chunks(model, ids, [5]).hidden) for model in models]
    assert torch.equal(*outs)
    assert relative_error(*outs) == 0


def test_names_without_the_model_prefix_load(tmp_path: Path) -> None:
    make_reference(*CASES["llama, tied"]).save_pretrained(tmp_path)
    source = SafetensorsFolder(tmp_path)
    tensors = {name.removeprefix("model."): source.get(name) for name in source.names()}
    del source
    save_file(tensors, tmp_path / "model.safetensors")
    load_target(tmp_path, torch.float32, SingleRank())


def test_a_tied_head_stored_again_must_equal_the_embedding(tmp_path: Path) -> None:
    make_reference(*CASES["llama, tied"]).save_pretrained(tmp_path)
    source = SafetensorsFolder(tmp_path)
    tensors = {name: source.get(name).clone() for name in source.names()}
    del source
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    load_target(tmp_path, torch.float32, SingleRank())
    tensors["lm_head.weight"][3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match=r"lm_head\.weight"):
        load_target(tmp_path, torch.float32, SingleRank())


def test_a_truncated_file_is_refused_by_its_name(tmp_path: Path) -> None:
    shard = write_sharded(tmp_path)[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(Refused, match=shard.name):
        SafetensorsFolder(tmp_path)


def test_a_missing_shard_is_refused_by_its_name(tmp_path: Path) -> None:
    shard = write_sharded(tmp_path)[1]
    shard.unlink()
    with pytest.raises(Refused, match=shard.name):
        SafetensorsFolder(tmp_path)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(Refused, match=r"tensor a.*one\.safetensors and two\.safetensors"):
        SafetensorsFolder(tmp_path)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(Refused, match=r"model\.ghost"):
        SafetensorsFolder(tmp_path)
    index.write_text("{")
    with pytest.raises(Refused, match="JSON object"):
        SafetensorsFolder(tmp_path)
    for place in (5, ["x"], "../outside.safetensors", "a\0b"):
        content["weight_map"]["model.ghost"] = place
        index.write_text(json.dumps(content))
        with pytest.raises(Refused, match=r"model\.ghost"):
            SafetensorsFolder(tmp_path)
    index.write_text('{"weight_map": 5}')
    with pytest.raises(Refused, match="weight_map"):
        SafetensorsFolder(tmp_path)


def test_a_folder_without_weights_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(Refused, match=r"Convert pytorch_model\.bin"):
        SafetensorsFolder(tmp_path)


def test_missing_weights_and_wrong_shapes_are_refused_by_name(tmp_path: Path) -> None:
    make_reference(*CASES["qwen3"]).save_pretrained(tmp_path)
    source = SafetensorsFolder(tmp_path)
    tensors = {name: source.get(name).clone() for name in source.names()}
    del source
    name = "model.layers.1.self_attn.k_norm.weight"
    wrong = tensors | {name: torch.zeros(3)}
    save_file(wrong, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match=rf"{name}.*norm shape: found \(3,\)"):
        load_target(tmp_path, torch.float32, SingleRank())
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match=rf"missing.*{name}"):
        load_target(tmp_path, torch.float32, SingleRank())


@pytest.mark.parametrize("found", ["nothing", "a file", "an empty folder"])
def test_what_is_no_model_is_refused(found: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if found == "a file":
        path.write_text("hello")
    elif found == "an empty folder":
        path.mkdir()
    with pytest.raises(Refused, match=str(path)):
        load_target(path, None, SingleRank())
