from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from knockon.bench.rollout.settings import settle
from knockon.bench.rollout.shapes import SHAPES, find_shape
from knockon.errors import Refused

DRAFTER = Path(__file__).parents[3] / "checkpoints" / "smollm2-135m-domino"


def test_published_shapes_are_the_published_sizes():
    big = find_shape("qwen3.6-27b")
    sizes = (big.vocab_size, big.hidden_size, big.gru_size, big.correction_size, big.block_size)
    assert sizes == (248320, 5120, 1024, 256, 16)
    assert (big.prefix_len, big.shift_label) == (1, False)
    small = find_shape("qwen3-8b")
    assert (small.vocab_size, small.hidden_size, small.shift_label) == (151936, 4096, True)
    assert (find_shape("qwen3.5-4b").vocab_size, find_shape("qwen3.5-4b").hidden_size) == (
        248320,
        2560,
    )


def test_a_drafters_folder_and_its_config_file_give_its_shape():
    config = json.loads((DRAFTER / "config.json").read_text())
    for path in (DRAFTER, DRAFTER / "config.json"):
        shape = find_shape(str(path))
        assert shape.name == "smollm2-135m-domino"
        assert shape.vocab_size == config["vocab_size"]
        assert shape.hidden_size == config["hidden_size"]
        assert shape.gru_size == config["dflash_config"]["gru_hidden_dim"]
        assert shape.shift_label is config["dflash_config"]["shift_label"]


def test_a_plain_dflash_drafter_is_refused(tmp_path):
    config = json.loads((DRAFTER / "config.json").read_text())
    config["dflash_config"]["projector_type"] = "dflash"
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(Refused, match="plain DFlash"):
        find_shape(str(file))


def test_an_unknown_shape_is_refused_with_the_known_names():
    with pytest.raises(Refused) as refused:
        settle(shape="qwen4", device="cpu")
    assert refused.value.field == "shape" and refused.value.found == "qwen4"
    assert all(name in refused.value.wanted for name in SHAPES)


def test_what_is_left_out_depends_on_the_device():
    on_cpu = settle(device="cpu")
    assert (on_cpu.shape.name, on_cpu.dtype, on_cpu.rounds, on_cpu.replays) == (
        "tiny",
        "float32",
        3,
        5,
    )
    assert on_cpu.steps == 15 and on_cpu.batches == (1, 8, 64)
    assert [v.label for v in on_cpu.variants] == ["base", "A", "B", "C"]


def test_an_fp8_head_adds_base_and_c_once_more():
    settings = settle(device="cpu", draft_head_dtype="fp8")
    assert [v.label for v in settings.variants] == [
        *("base", "A", "B", "C"),
        *("fp8 base", "fp8 C"),
    ]
    assert [v.head for v in settings.variants] == ["auto"] * 4 + ["fp8"] * 2


@pytest.mark.parametrize(
    ("field", "options"),
    (
        ("device", {"device": "tpu"}),
        ("dtype", {"dtype": "int8"}),
        ("tp_size", {"tp_size": 0}),
        ("tp_size", {"tp_size": 8193}),
        ("tp_size", {"tp_size": 2, "one_rank_of": 2}),
        ("one_rank_of", {"one_rank_of": 1}),
        ("one_rank_of", {"one_rank_of": 8193}),
        ("batches", {"batches": ()}),
        ("batches", {"batches": (1, 0)}),
        ("batches", {"batches": (2, 2)}),
        ("stages", {"stages": ("base", "D")}),
        ("stages", {"stages": ("A", "A")}),
        ("stages", {"stages": ("",)}),
        ("implementation", {"implementations": ("fast",)}),
        ("pool_size", {"pool_size": 0}),
        ("pool_size", {"pool_size": 8192}),
        ("steps", {"steps": 0}),
        ("steps", {"steps": 16}),
        ("rounds", {"rounds": 0}),
        ("replays", {"replays": 0}),
        ("check_proposals", {"check_proposals": 0}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 1 << 63}),
        ("draft_head_dtype", {"draft_head_dtype": "fp4"}),
        ("draft_head_dtype", {"draft_head_dtype": "fp8", "stages": ("A", "B")}),
        ("draft_head_dtype", {"draft_head_dtype": "fp8", "dtype": "float64"}),
    ),
)
def test_what_cannot_be_done_is_refused_by_field(field, options):
    with pytest.raises(Refused) as refused:
        settle(**{"device": "cpu", **options})
    assert refused.value.field == field


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(Refused, match="no CUDA device"):
        settle(device="cuda")


def test_a_pool_is_not_asked_of_stages_without_one():
    assert settle(device="cpu", stages=("base", "A"), pool_size=0).pool_size == 0


def test_enough_inputs_are_compared():
    for batches in ((1,), (1, 8, 64), (3,)):
        settings = settle(device="cpu", batches=batches)
        assert settings.check_inputs >= 3
        assert settings.check_inputs * sum(batches) * settings.steps >= 1095
