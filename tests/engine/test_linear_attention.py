"""What takes prompts through recurrent layers: how it is chosen, refused, and put to use."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from knockon.engine import defaults
from knockon.engine.config import EngineConfig
from knockon.engine.hardware import GPU, Hardware
from knockon.engine.settle import check, settle
from knockon.errors import Refused
from knockon.layers.fla_chunks import fla_obstacle
from tests.engine.generation import TinyShelf, check_same, generate, load, random_prompts, tokens
from tests.engine.test_hybrid import SHORT, TARGET
from tests.layers import fake_fla
from tests.reference_speculation import greedy_margin

PROMPTS = [*random_prompts(4), *random_prompts(2, seed=8, low=70, high=100)]


def machine(*capabilities: tuple[int, int]) -> Hardware:
    gpus = tuple(GPU("a GPU", 2**36, found) for found in capabilities)
    return Hardware("a CPU", 2, (), 2**34, 2**33, gpus)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "fla_obstacle", lambda: "")
    monkeypatch.setattr(defaults, "fla_version", lambda: "0.6.0")
    monkeypatch.setattr(defaults, "HAS_TRITON", True)


@pytest.mark.parametrize(
    ("capabilities", "dtype", "value", "why"),
    [
        ([(9, 0)], "bfloat16", "fla", "fla-core 0.6.0"),
        ([(8, 0)], "float16", "fla", "five kernels"),
        ([(9, 0)], "float32", "torch", "TF32"),
        ([(9, 0)], "float64", "torch", "FP64"),
        ([(7, 5)], "float16", "torch", "7.5 is too old"),
        ([], "bfloat16", "torch", "CUDA GPUs"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_auto_takes_the_kernels_where_they_run_and_lose_nothing(
    capabilities: list[tuple[int, int]], dtype: str, value: str, why: str
) -> None:
    choice = defaults.choose_linear_attention(machine(*capabilities), dtype)
    assert choice.value == value and why in choice.why


@pytest.mark.usefixtures("installed")
def test_a_settled_config_names_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knockon.engine.settle.detect", lambda: machine((9, 0)))

    def settled(**settings: Any) -> str:
        return settle(EngineConfig("model", **settings)).linear_attn_backend

    assert settled() == "fla"
    assert settled(linear_attn_backend="torch") == "torch"
    assert settled(dtype="float32") == "torch"
    assert settled(dtype="float32", linear_attn_backend="fla") == "fla"
    assert settled(device="cpu") == "torch"


@pytest.mark.usefixtures("installed")
def test_a_package_that_cannot_be_imported_is_passed_over_unless_asked_for(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("knockon.engine.settle.detect", lambda: machine((9, 0)))
    model = str(tiny.target(TARGET))
    fake_fla.install(monkeypatch)
    assert check(EngineConfig(model)).linear_attn_backend == "fla"
    assert not caplog.text
    del sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule
    assert check(EngineConfig(model)).linear_attn_backend == "torch"
    assert "prompts go through recurrent layers in PyTorch: fla-core" in caplog.text
    assert "chunk_gated_delta_rule" in caplog.text
    # By name it stays, and is refused where the runner is built.
    assert check(EngineConfig(model, linear_attn_backend="fla")).linear_attn_backend == "fla"


@pytest.mark.parametrize(
    ("settings", "obstacle", "message"),
    [
        ({"device": "cpu"}, "", "fla-core's kernels run on CUDA GPUs"),
        ({"dtype": "float64"}, "", "no kernels for FP64"),
        ({}, "fla-core is not installed", "fla-core is not installed"),
    ],
)
def test_kernels_that_cannot_run_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], obstacle: str, message: str
) -> None:
    monkeypatch.setattr("knockon.engine.settle.detect", lambda: machine((9, 0)))
    monkeypatch.setattr(defaults, "fla_obstacle", lambda: obstacle)
    monkeypatch.setattr(defaults, "HAS_TRITON", True)
    wanted = rf"linear_attn_backend: found 'fla', wanted torch or auto\b.*{message}"
    with pytest.raises(Refused, match=wanted):
        settle(EngineConfig("model", linear_attn_backend="fla", **settings))


def test_other_engines_names_are_refused() -> None:
    with pytest.raises(Refused, match="linear_attn_backend: found 'triton', wanted one of auto, "):
        EngineConfig("model", linear_attn_backend="triton")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, False),
        ({"linear_attn_backend": "fla"}, True),
        ({"linear_attn_backend": "torch", "mamba_ssm_dtype": "float32"}, True),
    ],
)
def test_a_target_without_recurrent_layers_has_no_use_for_it(
    tiny: TinyShelf, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], said: bool
) -> None:
    caplog.set_level(logging.WARNING)
    config = check(EngineConfig(str(tiny.target()), dtype="float32", device="cpu", **settings))
    assert config.linear_attn_backend == "torch"
    assert ("no recurrent layers" in caplog.text) == said
    assert all(name in caplog.text for name in settings)


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_go_through_the_kernels_and_nothing_else_does(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """On a CPU, with the package's interface computed by tokens in its place."""
    model, draft = tiny.target(TARGET), tiny.drafter("domino", TARGET)
    plain = generate(model, draft, PROMPTS, SHORT, device="cpu")
    rule = fake_fla.install(monkeypatch)
    monkeypatch.setattr("knockon.engine.settle.linear_attention_obstacle", lambda *_: "")
    settings: dict[str, Any] = {"overlap_schedule": overlap, "prefill_chunk": 64}
    with load(model, draft, device="cpu", linear_attn_backend="fla", **settings) as llm:
        assert llm.config.linear_attn_backend == "fla"
        found = llm.generate(PROMPTS, SHORT)
    check_same(found, plain)
    layers = 3
    rows = sum(given["q"].shape[0] * given["q"].shape[1] for given in rule.calls)
    prompts = sum(map(len, PROMPTS))
    # Each row of a prompt once a recurrent layer, and padding; blocks verified would be many more.
    assert layers * (prompts - len(PROMPTS)) <= rows <= layers * 2 * prompts
    assert {given["v"].shape[2:] for given in rule.calls} == {(6, 24)}


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [None, "domino", "mtp"])
def test_a_gpu_gives_the_tokens_of_the_plain_recurrence(
    tiny: TinyShelf, drafter: str | None
) -> None:
    """FP32 prompts, whose products are TF32 in the kernels: the leads are far beyond that."""
    obstacle = fla_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    model = tiny.target(TARGET)
    draft = tiny.drafter(drafter, TARGET) if drafter else None
    settings: dict[str, Any] = {"device": "cuda", "max_batch_size": 4, "kv_memory": 64 << 20}
    plain = generate(model, None, PROMPTS, SHORT, linear_attn_backend="torch", **settings)
    with load(model, draft, linear_attn_backend="fla", **settings) as llm:
        found = llm.generate(PROMPTS, SHORT)
        again = llm.generate(PROMPTS, SHORT)  # from checkpoints, where there are
    margins = [greedy_margin(model, each.prompt_token_ids, each.token_ids) for each in plain]
    assert tokens(found) == tokens(plain), f"the smallest leads: {margins}"
    assert tokens(again) == tokens(plain), f"the smallest leads: {margins}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gpu_takes_the_kernels_by_itself_for_16_bits(tiny: TinyShelf, dtype: str) -> None:
    obstacle = fla_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    with load(tiny.target(TARGET), dtype=dtype, device="cuda", kv_memory=64 << 20) as llm:
        assert llm.config.linear_attn_backend == "fla"
        found = llm.generate(PROMPTS, SHORT)
    assert all(len(output.token_ids) == SHORT.max_tokens for output in found)
