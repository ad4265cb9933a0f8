"""Qwen3.5 computes what transformers computes: whole, in chunks, token by token, in blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from knockon.errors import Refused
from knockon.layers import recurrent_state
from knockon.layers.fused import delta_inputs, gated_norm
from knockon.models.decoder import Decoder
from knockon.models.target import load_target
from knockon.parallel import SingleRank
from tests.lockstep import LockstepGroup, run_ranks
from tests.models.tiny_hybrid import (
    CASES,
    Run,
    Runner,
    make_reference,
    relative_error,
    save_with_images,
)

FIRST = "three of four layers recurrent"


def expected_of(reference: torch.nn.Module, ids: Tensor) -> Run:
    """Logits, hidden states and features after layers 1 and 0."""
    with torch.no_grad():
        out = reference(ids, output_hidden_states=True, use_cache=False)
    states = out.hidden_states
    return Run(out.logits, states[-1], torch.cat((states[2], states[1]), -1))


def check(found: Run, expected: Run) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_logits_hidden_states_and_features_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = make_reference(CASES[name])
    reference.save_pretrained(tmp_path)
    ids = torch.randint(0, 101, (2, 71))
    expected = expected_of(reference, ids)

    def program(group: LockstepGroup) -> Run:
        model = load_target(tmp_path, torch.float32, group)
        return Runner(model, 2).chunks(ids, [71], (1, 0))

    for size in (1, 2, 4):
        for found in run_ranks(size, program):
            check(found, expected)


@pytest.mark.parametrize("chunks", [[1] * 23, [5, 1, 17], [22, 1], [2, 16, 5]])
def test_chunks_and_single_tokens_equal_transformers(chunks: list[int], tmp_path: Path) -> None:
    reference = make_reference(CASES[FIRST])
    reference.save_pretrained(tmp_path)
    ids = torch.randint(0, 101, (2, 23))
    model = load_target(tmp_path, torch.float32, SingleRank())
    model.pack()
    check(Runner(model, 2).chunks(ids, chunks, (1, 0)), expected_of(reference, ids))


@pytest.mark.parametrize("size", [1, 2])
def test_a_block_of_which_any_number_of_rows_stands(size: int, tmp_path: Path) -> None:
    """Rows of a block, and those of the next one behind what was accepted of it."""
    reference = make_reference(CASES[FIRST])
    reference.save_pretrained(tmp_path)
    width, lengths = 16, torch.tensor([9, 30])
    prompt, drafts = torch.randint(0, 101, (2, 30)), torch.randint(0, 101, (2, 2 * width))

    def reference_rows(row: int, text: list[int]) -> Run:
        return Run(*(x[:, -width:] for x in expected_of(reference, torch.tensor([text]))))

    def program(group: LockstepGroup) -> list[tuple[Run, Run]]:
        model = load_target(tmp_path, torch.float32, group)
        found = []
        for accepted in range(1, width + 1):
            runner = Runner(model, 2)
            for row, length in enumerate(lengths.tolist()):
                one = Runner(model, 2)
                one.table, one.slots = runner.table[[row]], runner.slots[[row]]
                one.memory = runner.memory
                one.run(prompt[[row], :length], torch.tensor([0]))
            first = runner.run(drafts[:, :width], lengths, (1, 0), held=True)
            stand = torch.tensor([accepted, width + 1 - accepted])
            runner.commit(stand)
            second = runner.run(drafts[:, width:], lengths + stand, (1, 0), held=True)
            found.append((first, second))
        return found

    for found in run_ranks(size, program):
        for accepted, (first, second) in enumerate(found, 1):
            for row, stands in enumerate((accepted, width + 1 - accepted)):
                text = prompt[row, : lengths[row]].tolist()
                block, after = drafts[row, :width].tolist(), drafts[row, width:].tolist()
                check(Run(*(x[[row]] for x in first)), reference_rows(row, text + block))
                check(
                    Run(*(x[[row]] for x in second)),
                    reference_rows(row, text + block[:stands] + after),
                )


def test_a_row_has_the_same_bits_in_a_block_of_any_length(tmp_path: Path) -> None:
    make_reference(CASES[FIRST]).save_pretrained(tmp_path)
    model = load_target(tmp_path, torch.float32, SingleRank())
    model.pack()
    prompt, block = torch.randint(0, 101, (1, 21)), torch.randint(0, 101, (1, 12))

    def decoded(widths: list[int]) -> Tensor:
        runner, at, found = Runner(model, 1), 0, []
        runner.run(prompt, torch.tensor([0]))
        for width in widths:
            rows = block[:, at : at + width]
            found.append(runner.run(rows, torch.tensor([21 + at]), held=width > 1).logits)
            if width > 1:
                runner.commit(torch.tensor([rows.shape[1]]))
            at += width
        return torch.cat(found, 1)

    alone = decoded([1] * 12)
    for widths in ([12], [5, 7], [1, 8, 3], [2] * 6):
        assert torch.equal(decoded(widths), alone)


def test_kernels_in_a_model_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter in place of the twins, for all that has a kernel of its own."""
    pytest.importorskip("triton", reason="the kernels need Triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a device")
    make_reference(CASES[FIRST]).save_pretrained(tmp_path)
    model = load_target(tmp_path, torch.float32, SingleRank())
    prompt, block = torch.randint(0, 101, (2, 5)), torch.randint(0, 101, (2, 7))
    found = []
    for fused in (False, True):
        for module in (recurrent_state, delta_inputs, gated_norm):
            monkeypatch.setattr(module, "fuses", lambda x, fused=fused: fused)
        runner = Runner(model, 2)
        runner.run(prompt, torch.tensor([0, 0]))
        runs = [runner.run(block[:, :4], torch.tensor([5, 5]), held=True)]
        runner.commit(torch.tensor([1, 4]))
        runs.append(runner.run(block[:, 4:5], torch.tensor([6, 9])))
        runs.append(runner.run(block[:, 5:], torch.tensor([7, 10]), held=True))
        found.append(torch.cat([run.logits for run in runs], 1))
    assert relative_error(found[1], found[0]) < 1e-5


def test_states_in_bf16_cost_less_than_the_rounding_of_a_bf16_model(tmp_path: Path) -> None:
    make_reference(CASES[FIRST]).save_pretrained(tmp_path)
    wide = load_target(tmp_path, torch.float32, SingleRank())
    narrow = load_target(tmp_path, torch.bfloat16, SingleRank())
    ids = torch.randint(0, 101, (1, 120))

    def decoded(model: Decoder, state_dtype: torch.dtype) -> Tensor:
        runner = Runner(model, 1, 128, state_dtype)
        return runner.chunks(ids, [8, *[1] * 112]).logits[:, 8:].float()

    def error(found: Tensor) -> float:
        return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    exact = decoded(wide, torch.float32)
    of_states, of_weights = decoded(wide, torch.bfloat16), decoded(narrow, torch.float32)
    assert 1e-4 < error(of_states) < 0.4 * error(of_weights)


def test_a_text_model_within_one_of_images_is_the_same(tmp_path: Path) -> None:
    reference = make_reference(CASES[FIRST])
    reference.save_pretrained(tmp_path / "text")
    save_with_images(reference, tmp_path / "both")
    ids = torch.randint(0, 101, (1, 9))
    runs = [
        Runner(load_target(tmp_path / name, torch.float32, SingleRank()), 1).chunks(ids, [9])
        for name in ("text", "both")
    ]
    assert torch.equal(runs[0].logits, runs[1].logits)


def test_weights_of_an_image_reader_are_no_part_of_other_models(tmp_path: Path) -> None:
    make_reference(CASES[FIRST]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"model.seen.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match=r"without a use.*model\.seen\.weight"):
        load_target(tmp_path, torch.float32, SingleRank())


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("layers.0.linear_attn.in_proj_qkv.weight", 1),
        ("layers.0.linear_attn.conv1d.weight", 1),
        ("layers.0.linear_attn.A_log", 1),
        ("layers.0.linear_attn.norm.weight", 1),
        ("layers.3.self_attn.q_proj.weight", 1),
        ("layers.1.linear_attn.dt_bias", None),
    ],
)
def test_weights_that_do_not_fit_are_refused(name: str, cut: int | None, tmp_path: Path) -> None:
    make_reference(CASES[FIRST]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    held = weights.pop(f"model.{name}")
    if cut is not None:
        weights[f"model.{name}"] = held[:-cut].contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match=name.replace(".", r"\.")):
        load_target(tmp_path, torch.float32, SingleRank())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate: found False, wanted true"),
        ({"layer_types": ["linear_attention"] * 4}, "at least one layer of full attention"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": ["mamba"] * 4}, "layer_types"),
        ({"linear_num_value_heads": 6}, "linear_num_value_heads: found 6, wanted a multiple"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim: found None"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: found 1, wanted at least 2"),
        ({"text_config": 7}, "text_config: found 7, wanted an object"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method: found 'fp8'"),
    ],
)
def test_configurations_that_cannot_be_run_are_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    make_reference(CASES[FIRST]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match=message):
        load_target(tmp_path, torch.float32, SingleRank())


def test_a_head_tied_beside_the_text_settings_and_not_in_them_is_refused(tmp_path: Path) -> None:
    folder = save_with_images(make_reference(CASES[FIRST]), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match=r"text_config\.tie_word_embeddings: found False"):
        load_target(folder, torch.float32, SingleRank())
