from __future__ import annotations

import pytest

from knockon.engine import defaults
from knockon.engine.hardware import GPU, Hardware, detect


def machine(*flags: str, gpus: tuple[GPU, ...] = ()) -> Hardware:
    return Hardware("a CPU", 2, flags, 2**34, 2**33, gpus)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (("avx2", "avx512f"), "float32"),
        (("avx512f", "avx512_bf16"), "bfloat16"),
        (("amx_bf16",), "bfloat16"),
        ((), "float32"),
    ],
)
def test_a_cpu_uses_bfloat16_only_where_it_multiplies_it_natively(flags, dtype):
    assert defaults.choose_dtype(machine(*flags)).value == dtype


@pytest.mark.parametrize(("capability", "dtype"), [((9, 0), "bfloat16"), ((7, 5), "float32")])
def test_a_gpu_uses_bfloat16_from_capability_8(capability, dtype):
    gpu = GPU("a GPU", 2**36, capability)
    choice = defaults.choose_dtype(machine("avx512_bf16", gpus=(gpu,)))
    assert choice.value == dtype
    assert ".".join(map(str, capability)) in choice.why


def test_device_and_distributed_backend_go_together():
    gpu = GPU("a GPU", 2**36, (9, 0))
    on_gpu, on_cpu = machine(gpus=(gpu,)), machine()
    assert defaults.choose_device(on_gpu).value == "cuda"
    assert defaults.choose_distributed(on_gpu).value == "nccl"
    assert defaults.choose_device(on_cpu).value == "cpu"
    assert defaults.choose_distributed(on_cpu).value == "gloo"


def test_detection_reads_this_machine():
    found = detect()
    assert found.cpu
    assert found.cores >= 1
    assert 0 < found.memory_available <= found.memory


def test_the_fused_rollout_needs_a_recent_gpu_and_triton(monkeypatch):
    new, old = (machine(gpus=(GPU("a GPU", 2**36, found),)) for found in ((9, 0), (7, 5)))
    monkeypatch.setattr(defaults, "HAS_TRITON", True)
    found = [defaults.choose_rollout(m).value for m in (machine(), new, old)]
    assert found == ["plain", "fused", "plain"]
    monkeypatch.setattr(defaults, "HAS_TRITON", False)
    assert "Triton" in defaults.choose_rollout(new).why


@pytest.mark.parametrize(
    ("capability", "why"), [((9, 0), "half the bytes"), ((8, 9), "half the bytes"), ((8, 0), "8.0")]
)
def test_the_reason_for_the_draft_head_says_whether_fp8_would_be_faster(capability, why):
    choice = defaults.choose_draft_head(machine(gpus=(GPU("a GPU", 2**36, capability),)))
    assert choice.value == "auto" and why in choice.why
    assert "slower" in defaults.choose_draft_head(machine()).why


def test_steps_are_graphs_where_attention_reads_lengths_on_the_device(monkeypatch):
    new, old = (machine(gpus=(GPU("a GPU", 2**36, found),)) for found in ((9, 0), (7, 5)))
    monkeypatch.setattr(defaults, "HAS_TRITON", True)
    assert [defaults.choose_attention(m).value for m in (machine(), new, old)] == [
        "torch",
        "triton",
        "torch",
    ]
    assert [defaults.choose_steps(m).value for m in (machine(), new, old)] == [
        "eager",
        "graphs",
        "eager",
    ]
    monkeypatch.setattr(defaults, "HAS_TRITON", False)
    assert "Triton" in defaults.choose_attention(new).why
    assert defaults.choose_steps(new).value == "eager"


def test_a_gpu_computes_more_at_once_and_sizes_its_kv_by_what_is_free():
    cpu, gpu = defaults.default_sizes("cpu"), defaults.default_sizes("cuda")
    assert gpu.max_batch_size > cpu.max_batch_size
    assert gpu.prefill_chunk > cpu.prefill_chunk
    assert cpu.kv_memory == 512 << 20
    assert gpu.kv_memory is None
