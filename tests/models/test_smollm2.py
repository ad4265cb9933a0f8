"""The real small model: our reading of its GGUF file against transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from knockon.models.target import load_target
from knockon.models.tokenizer import load_tokenizer
from tests.lockstep import LockstepGroup, run_ranks
from tests.models.tiny_targets import relative_error, run_chunks

PROMPT = "The capital of France is Paris. Water boils at 100 degrees. def f(x): return"


def read_with_transformers(path: Path) -> LlamaForCausalLM:
    """Configuration, names, row order and values as transformers' own GGUF reader has them."""
    config = LlamaConfig(**load_gguf_checkpoint(str(path))["config"])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model


@pytest.mark.slow
def test_smollm2_equals_transformers_on_one_rank_and_several(smollm2_path: Path) -> None:
    reference = read_with_transformers(smollm2_path)
    ids = torch.tensor([load_tokenizer(smollm2_path).encode(PROMPT)])
    with torch.no_grad():
        expected = reference(ids, output_hidden_states=True)

    def program(group: LockstepGroup) -> tuple[Tensor, Tensor, Tensor]:
        model = load_target(smollm2_path, torch.float32, group)
        out = run_chunks(model, ids, [10, ids.shape[1] - 10], feature_layers=(1, 28))
        assert out.features is not None
        return model.logits(out.hidden), out.hidden, out.features

    features = torch.cat((expected.hidden_states[2], expected.hidden_states[29]), -1)
    for size in (1, 2, 3):
        for logits, hidden, kept in run_ranks(size, program):
            assert relative_error(logits, expected.logits) < 1e-5
            assert relative_error(hidden, expected.hidden_states[-1]) < 1e-5
            assert relative_error(kept, features) < 1e-5
