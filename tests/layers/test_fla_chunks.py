"""Flash-linear-attention's kernels get what they document, and equal the plain twin."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.layers import fla_chunks
from knockon.layers.delta_rule import DeltaInputs, delta_chunks, without_padding
from knockon.layers.fla_chunks import FlaChunks, fix_launches, fla_obstacle, settings_of, tuner_of
from tests.layers import fake_fla
from tests.layers.drawn_delta import draw_delta_inputs

# Key heads, value heads, key and value size. The last is a Qwen3.6-27B head's group.
SIZES = [(3, 6, 16, 24), (2, 2, 32, 64), (2, 6, 128, 128)]
ROWS = [1, 15, 64, 65, 200, 1000]
# Root mean square of the difference over that of the values. Rounding every tensor that the kernels
# keep of a chunk to BF16 was computed to move both by 5e-3, to FP16 by 6e-4; TF32 has FP16's digits
# but cuts off where that rounds. A wrong layout, scale or head is off by about 1.
NEAR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 3e-3}


def make(
    sizes: tuple[int, int, int, int], rows: int, batch: int, speed: float = 0.1
) -> tuple[DeltaInputs, Tensor]:
    """Inputs in FP32 whose states forget at some ``speed``, and states."""
    rng = torch.Generator().manual_seed(rows + sum(sizes))
    inputs = draw_delta_inputs(rng, batch, rows, sizes, speed)
    _, value_heads, key, value = sizes
    return inputs, torch.randn(batch, value_heads, key, value, generator=rng)


def on(device: str, inputs: DeltaInputs) -> DeltaInputs:
    return DeltaInputs(*(x.to(device) for x in inputs))


def moved(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def check_equal(inputs: DeltaInputs, state: Tensor, dtype: torch.dtype) -> None:
    """Hold the kernels to the plain twin in FP64."""
    held = state.clone()
    out, last = FlaChunks(dtype)(inputs, state)
    assert torch.equal(state, held)
    assert (out.dtype, last.dtype) == (torch.float32, torch.float32)
    wanted, wanted_last = delta_chunks(DeltaInputs(*(x.double() for x in inputs)), state.double())
    assert out.shape == wanted.shape and last.shape == wanted_last.shape
    errors = moved(out.double(), wanted), moved(last.double(), wanted_last)
    assert max(errors) < NEAR[dtype], errors


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> fake_fla.FakeRule:
    return fake_fla.install(monkeypatch)


@pytest.fixture(scope="module")
def kernels() -> str:
    """The device that the real package runs on."""
    obstacle = fla_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    return "cuda"


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("rows", [1, 65])
def test_the_rule_is_given_what_it_documents(
    rule: fake_fla.FakeRule, rows: int, dtype: torch.dtype
) -> None:
    inputs, state = make((2, 6, 5, 7), rows, 3)
    check_equal(inputs, state, dtype)
    (given,) = rule.calls
    assert {given[name].dtype for name in "qkv"} == {dtype}
    assert {given[n].dtype for n in ("g", "beta", "initial_state")} == {torch.float32}


def test_an_engine_imports_nothing_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("raise SystemExit('imported')")
    source = Path(importlib.import_module("knockon").__file__ or "").parents[1]
    paths = os.pathsep.join([str(tmp_path), str(source)])
    done = subprocess.run(
        [sys.executable, "-c", "import knockon.engine.assemble, knockon.models.target"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_package_without_the_kernel_is_refused_by_name(
    rule: fake_fla.FakeRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    del sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule
    with pytest.raises(Refused, match=r"linear_attn_backend: found 'fla'.*chunk_gated_delta_rule"):
        FlaChunks(torch.bfloat16)
    monkeypatch.delitem(sys.modules, "fla.ops.gated_delta_rule")
    with pytest.raises(Refused, match="linear_attn_backend: found 'fla', wanted torch"):
        FlaChunks(torch.bfloat16)


@pytest.mark.parametrize(
    ("version", "absent", "triton", "obstacle"),
    [
        (None, (), True, r"fla-core is not installed \(pip install fla-core\)"),
        ("0.5.9", (), True, "fla-core 0.5.9 is older than 0.6"),
        ("0.6.0", ("einops",), True, "fla-core 0.6.0 lacks einops"),
        ("0.6.0", (), False, "Triton"),
        ("0.6.0", (), True, "^$"),
        ("0.10.dev1", (), True, "^$"),
        ("1.0", (), True, "^$"),
    ],
)
def test_what_is_in_the_way_is_said(
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
    absent: tuple[str, ...],
    triton: bool,
    obstacle: str,
) -> None:
    monkeypatch.setattr(fla_chunks, "fla_version", lambda: version)
    monkeypatch.setattr(fla_chunks, "HAS_TRITON", triton)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in absent else SimpleNamespace()
    )
    assert re.search(obstacle, fla_obstacle())


def tuned(*settings: dict[str, int]) -> SimpleNamespace:
    """A kernel under heuristics under an autotuner, as the package has them."""
    configs = [
        SimpleNamespace(
            kwargs={k: v for k, v in each.items() if k.isupper()},
            num_warps=each["num_warps"],
            num_stages=each["num_stages"],
        )
        for each in settings
    ]
    return SimpleNamespace(fn=SimpleNamespace(configs=configs, fn=SimpleNamespace(fn=len)))


def test_each_kernel_is_left_one_launch_the_nearest_there_is(
    rule: fake_fla.FakeRule,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, name, wanted = fla_chunks.LAUNCHES[3]
    both = [
        {"BV": 64, "num_warps": 4, "num_stages": 2},
        {"BV": 32, "num_warps": 4, "num_stages": 4},
    ]
    for offered, expected in (([*both, wanted], wanted), (both, both[0])):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: tuned(*offered)}))
        for _ in range(2):
            missing = fix_launches()
        assert name not in missing and len(missing) == len(fla_chunks.LAUNCHES) - 1
        (left,) = tuner_of(module, name).configs
        assert settings_of(left) == expected
    # What is not an autotuned kernel any more is said, not stumbled over.
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: len}))
    FlaChunks(torch.bfloat16)
    assert name in caplog.text and "other bits" in caplog.text


@pytest.mark.gpu
def test_every_kernel_is_where_it_is_looked_for(kernels: str) -> None:
    assert fix_launches() == []
    for module, name, wanted in fla_chunks.LAUNCHES:
        (left,) = tuner_of(module, name).configs
        if torch.cuda.get_device_capability()[0] == 9:
            assert wanted.items() <= settings_of(left).items()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("sizes", SIZES)
def test_kernels_equal_the_plain_twin(
    kernels: str, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    for rows in ROWS:
        for begun in (True, False):
            inputs, state = make(sizes, rows, 2)
            check_equal(on(kernels, inputs), state.to(kernels) * begun, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NEAR)
def test_kernels_stay_finite_where_everything_is_forgotten(
    kernels: str, dtype: torch.dtype
) -> None:
    inputs, state = make(SIZES[2], 130, 1)
    gone = on(kernels, inputs._replace(log_decay=torch.full_like(inputs.log_decay, -90.0)))
    check_equal(gone, state.to(kernels), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padding_and_neighbours_change_nothing(kernels: str, dtype: torch.dtype) -> None:
    """Not a bit of the outputs; of a padded state the last, whose decay is added up further on."""
    counts = [130, 130, 70, 64, 1]
    padded, state = make(SIZES[2], 130, len(counts))
    inputs, state = on(kernels, padded), state.to(kernels)
    chunks = FlaChunks(dtype)
    out, last = chunks(without_padding(inputs, torch.tensor(counts, device=kernels)), state)
    for row, count in enumerate(counts):
        alone = DeltaInputs(*(x[[row], :count] for x in inputs))
        wanted, wanted_last = chunks(alone, state[[row]])
        assert torch.equal(out[[row], :count], wanted)
        if count == 130:
            assert torch.equal(last[[row]], wanted_last)
        assert moved(last[[row]], wanted_last) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_prompt_in_parts_of_whole_chunks_is_the_prompt(kernels: str, dtype: torch.dtype) -> None:
    """Cut where its own chunks end, a prompt has the same bits; elsewhere it is as near as ever."""
    inputs, state = make(SIZES[2], 200, 1)
    inputs, state = on(kernels, inputs), state.to(kernels)
    chunks = FlaChunks(dtype)
    whole, last = chunks(inputs, state)
    for cut in (128, 100):
        first, between = chunks(DeltaInputs(*(x[:, :cut] for x in inputs)), state)
        second, after = chunks(DeltaInputs(*(x[:, cut:] for x in inputs)), between)
        found = torch.cat([first, second], 1)
        if cut % 64 == 0:
            assert torch.equal(found, whole) and torch.equal(after, last)
        assert max(moved(found, whole), moved(after, last)) < 2 * NEAR[dtype]
