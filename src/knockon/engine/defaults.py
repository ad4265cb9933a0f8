"""What is used when nothing is asked for, and why: pure functions of the hardware."""

from __future__ import annotations

from dataclasses import dataclass

from knockon.engine.hardware import Hardware
from knockon.layers.fla_chunks import PACKAGE, fla_obstacle, fla_version
from knockon.rollout.fp8_head import LEAST_CAPABILITY as FP8_CAPABILITY
from knockon.rollout.fused.choose import LEAST_CAPABILITY
from knockon.triton_backend import HAS_TRITON

MIB = 1 << 20
_FAST_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


@dataclass(frozen=True)
class Choice:
    """A value and the reason for it, as a phrase."""

    value: str
    why: str


def choose_device(hardware: Hardware) -> Choice:
    """``cuda`` or ``cpu``."""
    if hardware.gpus:
        return Choice("cuda", f"{len(hardware.gpus)} x {hardware.gpus[0].name}")
    return Choice("cpu", "torch sees no CUDA device")


def choose_dtype(hardware: Hardware) -> Choice:
    """``bfloat16`` where the device multiplies it natively, else ``float32``.

    Decoding reads every weight once a step, so half the bytes is up to twice the speed; without
    native instructions the conversion eats that up.
    """
    if hardware.gpus:
        major, minor = hardware.gpus[0].capability
        if major >= 8:
            return Choice("bfloat16", f"compute capability {major}.{minor} multiplies it natively")
        return Choice("float32", f"compute capability {major}.{minor} has no native bfloat16")
    native = [flag for flag in _FAST_BF16_FLAGS if flag in hardware.cpu_flags]
    if native:
        return Choice("bfloat16", f"the CPU has {native[0]}: half the bytes to read per token")
    return Choice("float32", f"the CPU has none of {', '.join(_FAST_BF16_FLAGS)}")


def _obstacle(hardware: Hardware, kernels: str) -> str:
    """Why Triton kernels cannot run on the first GPU; empty where they can."""
    if not HAS_TRITON:
        return f"Triton, which the {kernels} kernels need, is not installed"
    major, minor = hardware.gpus[0].capability
    if major < LEAST_CAPABILITY:
        return f"compute capability {major}.{minor} is too old for the kernels"
    return ""


def choose_attention(hardware: Hardware) -> Choice:
    """The attention backend's name."""
    if not hardware.gpus:
        return Choice("torch", "PyTorch's own kernels, which run on every device")
    obstacle = _obstacle(hardware, "paged")
    if obstacle:
        return Choice("torch", obstacle)
    return Choice("triton", "paged kernels that read lengths on the device, as graphs need")


def linear_attention_obstacle(hardware: Hardware, dtype: str) -> str:
    """Why flash-linear-attention's kernels cannot run here; empty where they can."""
    if not hardware.gpus:
        return f"{PACKAGE}'s kernels run on CUDA GPUs"
    if dtype == "float64":
        return f"{PACKAGE} has no kernels for FP64"
    return fla_obstacle() or _obstacle(hardware, PACKAGE)


def choose_linear_attention(hardware: Hardware, dtype: str) -> Choice:
    """What takes prompts through recurrent layers.

    FP32 is asked for where results are compared to the last digits, and is left to PyTorch.
    """
    obstacle = linear_attention_obstacle(hardware, dtype)
    if not obstacle and dtype == "float32":
        obstacle = f"{PACKAGE} multiplies FP32 as TF32; ask for fla where that will do"
    if obstacle:
        return Choice("torch", obstacle)
    return Choice("fla", f"{PACKAGE} {fla_version()}: a chunked prompt in five kernels")


def choose_steps(hardware: Hardware) -> Choice:
    """How engine steps run."""
    attention = choose_attention(hardware)
    if attention.value == "triton":
        return Choice("graphs", "one CUDA graph a step, launched while the one before runs")
    if hardware.gpus:
        return Choice("eager", "graphs need the paged kernels")
    return Choice("eager", "on a CPU each step runs to its end before the next begins")


@dataclass(frozen=True)
class Sizes:
    """What one engine computes and holds at once, where nothing is asked for."""

    max_batch_size: int
    prefill_chunk: int
    kv_memory: int | None


def default_sizes(device: str) -> Sizes:
    """A GPU has arithmetic to spare for more requests and longer chunks; its KV takes what is free.

    On a CPU 64 rows are already limited by arithmetic, and memory is shared with all else.
    """
    if device == "cuda":
        return Sizes(64, 4096, None)
    return Sizes(32, 512, 512 * MIB)


def choose_rollout(hardware: Hardware) -> Choice:
    """``fused`` or ``plain``, for a candidate pool; a rollout may find more in its head's way."""
    if not hardware.gpus:
        return Choice("plain", "the fused kernels need a CUDA GPU")
    obstacle = _obstacle(hardware, "fused")
    if obstacle:
        return Choice("plain", obstacle)
    return Choice("fused", "Triton kernels, where a candidate pool is used (K > 0)")


def choose_draft_head(hardware: Hardware) -> Choice:
    """The LM head that proposals are made with, and whether an FP8 copy of it would be faster."""
    if not hardware.gpus:
        return Choice("auto", "the target's own; on a CPU a copy in fp8 is slower")
    major, minor = hardware.gpus[0].capability
    if (major, minor) < FP8_CAPABILITY:
        return Choice("auto", f"the target's own; compute capability {major}.{minor} has no fp8")
    return Choice("auto", "the target's own; fp8 reads half the bytes, from a copy that takes more")


def choose_distributed(hardware: Hardware) -> Choice:
    """The ``torch.distributed`` backend between ranks."""
    if hardware.gpus:
        return Choice("nccl", "ranks on CUDA devices")
    return Choice("gloo", "ranks on CPUs")
