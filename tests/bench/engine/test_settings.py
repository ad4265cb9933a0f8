from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from knockon.bench.engine.parsing import (
    parse_accept_lengths,
    parse_alternate,
    parse_narrow_accept_lengths,
    parse_verify_widths,
)
from knockon.bench.engine.reference import read_reference
from knockon.bench.engine.settings import (
    ACCEPT_LENGTHS,
    METHODS,
    settle,
)
from knockon.bench.engine.variant import Variant
from knockon.errors import Refused

REFERENCES = Path(__file__).parents[3] / "benchmarks" / "references"


def test_what_is_left_out_depends_on_the_device():
    on_cpu = settle(device="cpu")
    assert (on_cpu.shape.name, on_cpu.dtype, on_cpu.repeats) == ("tiny", "float32", 1)
    assert (on_cpu.input_len, on_cpu.output_len, on_cpu.concurrency) == (32, 64, (1, 4))
    assert on_cpu.verify_widths == (16,) and on_cpu.accept_lengths == ACCEPT_LENGTHS
    assert on_cpu.methods == tuple(METHODS)
    assert [on_cpu.prompts_at(c) for c in (1, 4)] == [2, 8]
    assert [variant.label for variant in on_cpu.variants] == ["target", "dflash w16", "domino w16"]


@pytest.mark.parametrize(
    ("field", "options"),
    (
        ("device", {"device": "tpu"}),
        ("dtype", {"dtype": "int8"}),
        ("model", {"model": "nameless"}),
        ("methods", {"methods": ()}),
        ("methods", {"methods": ("target", "target")}),
        ("methods", {"methods": ("eagle",)}),
        ("concurrency", {"concurrency": (0,)}),
        ("concurrency", {"concurrency": (2, 2)}),
        ("num_prompts", {"concurrency": (4,), "num_prompts": 3}),
        ("input_len", {"input_len": 0}),
        ("output_len", {"output_len": 1}),
        ("input_len + output_len", {"input_len": 4000, "output_len": 97}),
        ("verify_width", {"verify_widths": (1,)}),
        ("verify_width", {"verify_widths": (8, 17)}),
        ("verify_width", {"verify_widths": (8, 8)}),
        ("verify_width", {"verify_widths": ("any",)}),
        ("verify_width", {"verify_widths": ()}),
        ("alternate", {"alternate": (8, 8)}),
        ("alternate", {"alternate": (0, 8)}),
        ("draft_head_dtype", {"draft_head_dtype": "int4"}),
        ("draft_head_dtype", {"draft_head_dtype": "fp8", "dtype": "float64"}),
        ("accept_length of dflash", {"accept_lengths": {"dflash": 17.0}}),
        ("accept_length of domino", {"accept_lengths": {"domino": 0.5}}),
        ("accept_length of domino", {"narrow_accept_lengths": {"domino": (8, 5.0)}}),
        ("narrow_accept_length of domino", {"narrow_accept_lengths": {"domino": (16, 7)}}),
        ("pool_size", {"pool_size": -1}),
        ("repeats", {"repeats": 0}),
        ("seed", {"seed": -1}),
    ),
)
def test_what_cannot_be_done_is_refused_by_field(field, options):
    with pytest.raises(Refused) as refused:
        settle(**{"device": "cpu", **options})
    assert refused.value.field == field


def test_a_method_has_a_variant_for_every_width_and_the_target_one():
    settings = settle(device="cpu", verify_widths=(8, "auto"), alternate=(1, 9))
    assert settings.variants_of("domino") == (Variant("domino", 8), Variant("domino", "auto"))
    assert settings.variants_of("target") == (Variant("target", 1),)
    assert settings.max_batch_size == 9
    assert [v.label for v in settings.variants[1:]] == [
        *("dflash w8", "dflash auto", "domino w8", "domino auto")
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(Refused, match="no CUDA device"):
        settle(device="cuda")


def test_an_accept_length_is_not_asked_of_methods_left_out():
    assert settle(device="cpu", methods=("target",), verify_widths=(4,)).accept_lengths == {}


def test_lists_are_read_with_commas_between():
    assert parse_accept_lengths("dflash=6.5, domino = 9") == {"dflash": 6.5, "domino": 9.0}
    for text in ("dflash", "dflash=x", "target=2", "dflash=2,dflash=3", ""):
        with pytest.raises(Refused, match="METHOD=MEAN"):
            parse_accept_lengths(text)
    assert parse_verify_widths("8, auto,16") == (8, "auto", 16)
    assert parse_alternate("1, 32") == (1, 32)
    assert parse_narrow_accept_lengths("domino@8 = 6.335") == {"domino": (8, 6.335)}
    for text in ("domino=6", "target@8=2", "domino@x=6", "domino@8=6,domino@4=3"):
        with pytest.raises(Refused, match="METHOD@WIDTH=MEAN"):
            parse_narrow_accept_lengths(text)


def test_the_shipped_reference_is_read_and_says_what_differs():
    reference = read_reference(REFERENCES / "vllm_0.25.1_qwen3_8b.json")
    assert reference.tokens_per_second[("target", 1)] == 190
    assert reference.tokens_per_second[("dflash", 32)] == 12088
    assert reference.step_ms[("dflash", 8)] == 8.1
    alike = {"model": "qwen3-8b", "dtype": "bfloat16", "input_len": 256, "output_len": 512}
    assert reference.differences(settle(device="cpu", **alike)) == ""
    assert "model qwen3-8b, here tiny" in reference.differences(settle(device="cpu"))


@pytest.mark.parametrize(
    ("part", "value"),
    (
        ("name", None),
        ("results", "none"),
        ("results", [{"method": "eagle", "concurrency": 1, "tokens_per_second": 1}]),
        ("results", [{"method": "target", "tokens_per_second": 1}]),
        ("results", [{"method": "target", "concurrency": 1, "tokens_per_second": 0}]),
    ),
)
def test_a_damaged_reference_is_refused(tmp_path, part, value):
    data = json.loads((REFERENCES / "vllm_0.25.1_qwen3_8b.json").read_text())
    if value is None:
        del data[part]
    else:
        data[part] = value
    file = tmp_path / "reference.json"
    file.write_text(json.dumps(data))
    with pytest.raises(Refused, match="reference"):
        read_reference(file)
