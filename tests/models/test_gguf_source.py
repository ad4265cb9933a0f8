"""GGUF files hold the model that transformers holds, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from knockon.errors import Refused
from knockon.layers.rotary import RopeConfig, inverse_frequencies
from knockon.models import gguf_header
from knockon.models.gguf_source import GGUFFile
from knockon.models.target import load_target, read_config
from knockon.parallel import SingleRank
from tests.models.gguf_writing import write_gguf
from tests.models.tiny_targets import make_reference, relative_error, rope, run_chunks

Kind = gguf.GGMLQuantizationType
BLOCKS = {"hidden_size": 96, "intermediate_size": 96, "head_dim": 32}  # rows of whole blocks
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**BLOCKS, "tie_word_embeddings": True, **rope(theta=5e4)}),
    "llama, biases": ("llama", {**BLOCKS, "attention_bias": True, **rope()}),
    "qwen3": ("qwen3", {**BLOCKS, "num_attention_heads": 3, **rope(theta=1e6)}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_f32_file_is_the_same_model(name: str, tmp_path: Path) -> None:
    reference = make_reference(*CASES[name])
    path = write_gguf(tmp_path / "model.gguf", reference)
    weights = dict(reference.named_parameters())
    source = GGUFFile(path)
    assert source.names() == set(weights)
    for weight, expected in weights.items():
        assert torch.equal(source.get(weight), expected)

    config = read_config(path)
    assert (config.head_dim, config.vocab_size, config.dtype) == (32, 101, torch.float32)
    assert config.tie_word_embeddings == CASES[name][1].get("tie_word_embeddings", False)
    assert config.eos_token_ids == (2, 7)
    model = load_target(path, None, SingleRank())
    ids = torch.randint(0, 101, (2, 7))
    with torch.no_grad():
        expected = reference(ids).logits
    assert relative_error(model.logits(run_chunks(model, ids, [7]).hidden), expected) < 1e-5


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.F16, Kind.BF16])
def test_quantised_matrices_are_dequantised_as_the_package_does(kind: Kind, tmp_path: Path) -> None:
    reference = make_reference(*CASES["qwen3"])
    path = write_gguf(tmp_path / "model.gguf", reference, kind)
    source, rounded = GGUFFile(path), GGUFFile(path, torch.bfloat16)
    for name, parameter in reference.named_parameters():
        expected = parameter.detach()
        if expected.ndim == 2:
            stored = gguf.quants.quantize(expected.numpy(), kind)
            expected = torch.from_numpy(np.array(gguf.quants.dequantize(stored, kind)))
        assert torch.equal(source.get(name), expected)
        assert torch.equal(rounded.get(name), expected.bfloat16())
    assert read_config(path).dtype == (torch.float16 if kind == Kind.F16 else torch.bfloat16)


def test_large_tensors_are_dequantised_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_reference(*CASES["qwen3"]), Kind.Q8_0)
    whole = {name: GGUFFile(path).get(name) for name in GGUFFile(path).names()}
    monkeypatch.setattr("knockon.models.gguf_source._CHUNK_VALUES", 32 * 7)
    for name, expected in whole.items():
        assert torch.equal(GGUFFile(path).get(name), expected)


def test_llama3_scaling_stored_as_divisors_gives_llama3_frequencies(tmp_path: Path) -> None:
    settings = rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )
    reference = make_reference("llama", {**BLOCKS, **settings})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference.config)
    plain = inverse_frequencies(RopeConfig(10000.0), 32)
    divisors = (plain / scaled).numpy().astype(np.float32)
    path = write_gguf(tmp_path / "model.gguf", reference, divisors=divisors)
    torch.testing.assert_close(inverse_frequencies(read_config(path).rope, 32), scaled)
    model = load_target(path, torch.float32, SingleRank())
    ids = torch.randint(0, 101, (1, 9))
    with torch.no_grad():
        expected = reference(ids).logits
    assert relative_error(model.logits(run_chunks(model, ids, [9]).hidden), expected) < 1e-5


def test_every_cut_of_a_file_is_refused_and_never_crashes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_reference(*CASES["llama"]))
    whole = path.read_bytes()
    for size in [0, 3, 10, 23, 24, 30, 100, 300, 1000, 2500, 4000, len(whole) - 64]:
        path.write_bytes(whole[:size])
        with pytest.raises(Refused, match=r"model\.gguf"):
            GGUFFile(path)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(Refused, match="GGML"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + bytes(100))
    with pytest.raises(Refused, match="version: found 99"):
        GGUFFile(path)


def test_missing_tensors_are_refused_by_name(tmp_path: Path) -> None:
    reference = make_reference(*CASES["qwen3"])
    path = write_gguf(tmp_path / "a.gguf", reference, leave_out="blk.1.ffn_up.weight")
    with pytest.raises(Refused, match=r"missing.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_target(path, None, SingleRank())
    path = write_gguf(tmp_path / "b.gguf", reference, leave_out="token_embd.weight")
    with pytest.raises(Refused, match=r"token_embd\.weight"):
        read_config(path)


def test_unknown_scaling_and_architectures_are_refused(tmp_path: Path) -> None:
    reference = make_reference(*CASES["llama"])
    path = write_gguf(
        tmp_path / "a.gguf", reference, metadata={"llama.rope.scaling.type": "longrope"}
    )
    with pytest.raises(Refused, match="longrope"):
        read_config(path)
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(Refused, match="mamba"):
        read_config(tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.head_count_kv", 7),  # rows that make no whole pairs
        ("llama.embedding_length", 1 << 23),  # another width than the embedding's
        ("llama.block_count", 1 << 31),
        ("llama.context_length", 1 << 31),
        ("tokenizer.ggml.eos_token_id", None),
    ],
)
def test_sizes_that_fit_no_weight_are_refused(key: str, value: int | None, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_reference(*CASES["llama"]))
    content = bytearray(path.read_bytes())
    kind = content.index(key.encode()) + len(key)
    if value is None:
        content[kind] = 6  # read as a float instead of an integer
    else:
        content[kind + 4 : kind + 8] = value.to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(Refused):
        load_target(path, None, SingleRank())


def test_a_header_is_parsed_once_until_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []
    inner = gguf_header._read
    monkeypatch.setattr(gguf_header, "_read", lambda *a: (parsed.append(a[0]), inner(*a))[1])
    path = write_gguf(tmp_path / "model.gguf", make_reference(*CASES["llama"]))
    first, second = (gguf_header.read_header(path) for _ in range(2))
    assert parsed == [path] and first.metadata == second.metadata
    other = write_gguf(tmp_path / "other.gguf", make_reference(*CASES["qwen3"]))
    other.replace(path)
    assert gguf_header.read_header(path).architecture == "qwen3" and len(parsed) == 2
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(Refused, match="truncated"):
        gguf_header.read_header(path)
