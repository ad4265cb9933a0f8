"""Llama and Qwen3 compute what transformers computes, on one rank and on several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from knockon.models.target import load_target
from knockon.parallel import SingleRank
from tests.lockstep import LockstepGroup, run_ranks
from tests.models.tiny_targets import CASES, make_reference, relative_error, run_chunks


@pytest.mark.parametrize("name", CASES)
def test_logits_hidden_states_and_features_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = make_reference(*CASES[name])
    reference.save_pretrained(tmp_path)
    ids = torch.randint(0, 101, (2, 13))
    with torch.no_grad():
        expected = reference(ids, output_hidden_states=True)

    def program(group: LockstepGroup) -> tuple[Tensor, Tensor, Tensor]:
        model = load_target(tmp_path, torch.float32, group)
        out = run_chunks(model, ids, [13], feature_layers=(1, 0))
        assert out.features is not None
        return model.logits(out.hidden), out.hidden, out.features

    features = torch.cat((expected.hidden_states[2], expected.hidden_states[1]), -1)
    for size in (1, 2, 3):
        for logits, hidden, kept in run_ranks(size, program):
            assert relative_error(logits, expected.logits) < 1e-5
            assert relative_error(hidden, expected.hidden_states[-1]) < 1e-5
            assert relative_error(kept, features) < 1e-5


@pytest.mark.parametrize("name", ["llama, one KV head, llama3", "qwen3, sliding windows"])
@pytest.mark.parametrize("chunks", [[1] * 13, [5, 1, 7], [12, 1]])
def test_chunked_prefill_equals_whole_prefill(name: str, chunks: list[int], tmp_path: Path) -> None:
    make_reference(*CASES[name]).save_pretrained(tmp_path)
    model = load_target(tmp_path, torch.float32, SingleRank())
    ids = torch.randint(0, 101, (2, 13))
    whole = run_chunks(model, ids, [13], (1,))
    pieces = run_chunks(model, ids, chunks, (1,))
    assert whole.features is not None and pieces.features is not None
    assert relative_error(pieces.hidden, whole.hidden) < 1e-5
    assert relative_error(pieces.features, whole.features) < 1e-5


@pytest.mark.parametrize("name", ["llama, wide heads, biases, linear", "llama, tied"])
def test_packing_for_the_cpu_changes_no_result(name: str, tmp_path: Path) -> None:
    make_reference(*CASES[name]).save_pretrained(tmp_path)
    model = load_target(tmp_path, torch.float32, SingleRank())
    ids = torch.randint(0, 101, (2, 6))
    plain = model.logits(run_chunks(model, ids, [6]).hidden)
    model.pack()
    assert relative_error(model.logits(run_chunks(model, ids, [6]).hidden), plain) < 1e-5


def test_embeddings_and_feature_order_are_the_models_own(tmp_path: Path) -> None:
    reference = make_reference(*CASES["qwen3"])
    reference.save_pretrained(tmp_path)
    model = load_target(tmp_path, torch.float32, SingleRank())
    ids = torch.randint(0, 101, (2, 3))
    assert torch.equal(model.embed(ids), reference.get_input_embeddings()(ids))
    both = run_chunks(model, ids, [3], (0, 1)).features
    swapped = run_chunks(model, ids, [3], (1, 0)).features
    assert both is not None and swapped is not None
    assert torch.equal(both.roll(48, -1), swapped)
    assert run_chunks(model, ids, [3]).features is None


def test_bfloat16_stays_near_fp32(tmp_path: Path) -> None:
    make_reference(*CASES["qwen3"]).save_pretrained(tmp_path)
    ids = torch.randint(0, 101, (2, 9))
    wide = load_target(tmp_path, torch.float32, SingleRank())
    narrow = load_target(tmp_path, torch.bfloat16, SingleRank())
    logits = narrow.logits(run_chunks(narrow, ids, [9]).hidden)
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits.float(), wide.logits(run_chunks(wide, ids, [9]).hidden)) < 0.05
