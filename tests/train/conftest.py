"""A tiny random Llama as the target, in this project's form and in transformers'."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from knockon.drafters.config import parse_draft_config
from knockon.models.config import parse_hf
from knockon.train.drafter_module import DraftModule
from knockon.train.export import draft_config_dict
from knockon.train.frozen_target import FrozenTarget

VOCAB = 96
FEATURES = (0, 1, 2)


class StateDict:
    """A weight source over a transformers model."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.weights = model.state_dict()

    def names(self) -> set[str]:
        return set(self.weights)

    def get(self, name: str) -> torch.Tensor:
        return self.weights[name]

    def describe(self) -> str:
        return "a transformers model"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def target(llama: LlamaForCausalLM) -> FrozenTarget:
    config = parse_hf(llama.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    return FrozenTarget(config, StateDict(llama), "cpu", torch.float32, max_positions=256)


@pytest.fixture
def draft_dict(target: FrozenTarget) -> dict:
    return draft_config_dict(
        target.config,
        layers=2,
        target_layer_ids=FEATURES,
        mask_token_id=0,
        block_size=4,
        gru_size=8,
        correction_size=8,
    )


@pytest.fixture
def module(draft_dict: dict) -> DraftModule:
    found = DraftModule(parse_draft_config(draft_dict))
    found.initialise(0)
    return found
