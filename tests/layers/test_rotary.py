"""Angles, tables and rotation agree with transformers' for every kind of scaling in use."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from knockon.layers.rotary import RopeConfig, RotaryEmbedding, inverse_frequencies

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
CASES = {
    "default": ({}, RopeConfig(10000.0)),
    "linear": ({"factor": 2.5}, RopeConfig(10000.0, "linear", factor=2.5)),
    "llama3": (LLAMA3, RopeConfig(10000.0, "llama3", factor=8.0, original_max_positions=256)),
    "yarn": (YARN, RopeConfig(10000.0, "yarn", factor=4.0, original_max_positions=64)),
    "yarn, every option": (
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3,
                "truncate": False},
        RopeConfig(10000.0, "yarn", factor=4.0, original_max_positions=64, beta_fast=16.0,
                   beta_slow=2.0, mscale=0.7, mscale_all_dim=1.3, truncate=False),
    ),
    "yarn, attention factor": (
        YARN | {"attention_factor": 1.25},
        RopeConfig(10000.0, "yarn", factor=4.0, original_max_positions=64, attention_factor=1.25),
    ),
}  # fmt: skip


def hugging_face(parameters: dict[str, object], kind: str) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **parameters},
    )


@pytest.mark.parametrize("name", CASES)
def test_tables_and_rotation_equal_transformers(name: str) -> None:
    parameters, rope = CASES[name]
    config = hugging_face(parameters, rope.kind)
    reference = LlamaRotaryEmbedding(config)
    if rope.kind != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope.kind](config)
        torch.testing.assert_close(inverse_frequencies(rope, 32), frequencies, rtol=1e-6, atol=0)
        assert rope.attention_scaling() == pytest.approx(scaling, rel=1e-12)

    positions = torch.tensor([[0, 1, 2, 500, 511], [7, 8, 9, 10, 11]])
    ours = RotaryEmbedding(rope, 32, 512)
    cos, sin = ours.tables(positions)
    q, k = torch.randn(2, 5, 4, 32), torch.randn(2, 5, 2, 32)
    reference_cos, reference_sin = reference(q, positions)
    expected_q, expected_k = apply_rotary_pos_emb(
        q, k, reference_cos, reference_sin, unsqueeze_dim=2
    )
    torch.testing.assert_close(ours.apply(q, cos, sin), expected_q, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(ours.apply(k, cos, sin), expected_k, rtol=1e-5, atol=2e-5)


def test_query_and_key_heads_may_be_rotated_together_as_a_strided_view() -> None:
    rotary = RotaryEmbedding(RopeConfig(10000.0), 8, 16)
    cos, sin = rotary.tables(torch.arange(3)[None])
    fused = torch.randn(1, 3, 5 * 8).view(1, 3, 5, 8)
    together = rotary.apply(fused[:, :, :4], cos, sin)
    assert torch.equal(together[:, :, :3], rotary.apply(fused[:, :, :3], cos, sin))
    assert torch.equal(together[:, :, 3:], rotary.apply(fused[:, :, 3:4], cos, sin))


def test_a_partial_factor_leaves_the_rest_of_the_head_alone() -> None:
    rotary = RotaryEmbedding(RopeConfig(10000.0, partial_rotary_factor=0.25), 32, 16)
    x = torch.randn(1, 4, 2, 32)
    cos, sin = rotary.tables(torch.arange(4)[None])
    turned = rotary.apply(x, cos, sin)
    whole = RotaryEmbedding(RopeConfig(10000.0), 8, 16)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    tables = whole.tables(torch.arange(4)[None])
    assert torch.equal(turned[..., :8], whole.apply(x[..., :8], *tables))


def test_bfloat16_heads_are_rotated_in_fp32_and_rounded_once() -> None:
    rotary = RotaryEmbedding(RopeConfig(10000.0), 32, 64)
    x = torch.randn(1, 4, 2, 32).bfloat16()
    cos, sin = rotary.tables(torch.arange(4)[None] + 50)
    turned = rotary.apply(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotary.apply(x.float(), cos, sin).bfloat16())


def test_a_position_beyond_the_table_is_an_error_not_a_clamp() -> None:
    rotary = RotaryEmbedding(RopeConfig(10000.0), 8, 16)
    with pytest.raises((IndexError, RuntimeError)):
        rotary.tables(torch.tensor([16]))


def test_frequency_divisors_divide_each_frequency() -> None:
    plain = inverse_frequencies(RopeConfig(10000.0), 8)
    divided = inverse_frequencies(RopeConfig(10000.0, frequency_divisors=(1.0, 2.0, 4.0, 8.0)), 8)
    assert torch.equal(divided, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))
