"""Prompts through the gated delta rule by flash-linear-attention's chunk kernels (``fla-core``).

Five launches compute what :func:`~knockon.layers.delta_rule.delta_chunks` computes in a dozen a
chunk. The package is optional and slow to import, so nothing here imports it before it is used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.layers.delta_rule import DeltaInputs
from knockon.triton_backend import HAS_TRITON

logger = logging.getLogger(__name__)

PACKAGE = "fla-core"
LEAST_VERSION = (0, 6)
_INSTALL = "pip install fla-core"
_NEEDED = ("fla", "einops")

# How each of its kernels is launched. Left to itself every process times a few dozen settings on
# its first prompt and takes whichever was fastest that once; sums are then not always added up in
# the same order, and two processes may give a prompt other bits. All fit the shared memory of any
# GPU from compute capability 8.0 on with 16-bit inputs.
LAUNCHES: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("fla.ops.utils.cumsum", "chunk_local_cumsum_scalar_kernel", {"num_warps": 1}),
    (
        "fla.ops.gated_delta_rule.chunk_fwd",
        "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
        {"BK": 64, "num_warps": 1},
    ),
    (
        "fla.ops.gated_delta_rule.wy_fast",
        "recompute_w_u_fwd_kernel",
        {"num_warps": 4, "num_stages": 3},
    ),
    (
        "fla.ops.common.chunk_delta_h",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        {"BV": 32, "num_warps": 4, "num_stages": 2},
    ),
    (
        "fla.ops.common.chunk_o",
        "chunk_fwd_kernel_o",
        {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 3},
    ),
)


def fla_version() -> str | None:
    """Of the installed package, which is not imported for that."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def fla_obstacle() -> str:
    """Why this Python cannot use the kernels, as a phrase; empty where it can."""
    version = fla_version()
    if version is None:
        return f"{PACKAGE} is not installed ({_INSTALL})"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        return f"{PACKAGE} {version} is older than {least} ({_INSTALL})"
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{PACKAGE} {version} lacks {' and '.join(missing)} ({_INSTALL})"
    if not HAS_TRITON:
        return f"Triton, which {PACKAGE} needs, is not installed"
    return ""


class FlaChunks:
    """Prompts by the kernels; called as :func:`~knockon.layers.delta_rule.delta_chunks` is.

    Queries, keys, values and what the kernels keep of a chunk are rounded to ``dtype``; decays,
    writing strengths, sums and the states that come and go are FP32. Products of FP32 inputs are
    TF32. Rows are cut into chunks of 64 from the first on, the last one shorter, each sequence of
    the batch by itself.

    Args:
        dtype: what queries, keys and values go in as: the model's own, BF16, FP16 or FP32.

    Raises:
        Refused: a package that cannot be imported, or has no such kernels.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._rule = import_rule()
        free = fix_launches()
        if free:
            logger.warning(
                "%s %s has no %s to settle the launch of: prompts may get other bits in another "
                "process",
                PACKAGE,
                fla_version(),
                ", ".join(free),
            )

    def __call__(self, inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs, as ``v``, and the last state.

        Args:
            inputs: FP32 on a CUDA device; queries are scaled already.
            state: ``[B, value_heads, key_dim, value_dim]`` FP32; left as it is.
        """
        q, k, v = (x.to(self.dtype) for x in (inputs.q, inputs.k, inputs.v))
        out, last = self._rule(
            q=q,
            k=k,
            v=v,
            g=inputs.log_decay,
            beta=inputs.beta,
            scale=1.0,
            initial_state=state,
            output_final_state=True,
        )
        return out.to(inputs.v.dtype), last


def import_rule() -> Any:
    """The package's chunked gated delta rule.

    Raises:
        Refused: a package that cannot be imported, or has none.
    """
    # Or it hands a call on to other packages where they are installed, whose launches are theirs,
    # or takes settings from files.
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    os.environ["FLA_CACHE_MODE"] = "disabled"
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as error:  # whatever a package of others does when imported
        wanted = "torch, or a package that can be imported"
        why = f"{PACKAGE} {fla_version()}: {type(error).__name__}: {error}."
        raise Refused("linear_attn_backend", "fla", wanted, why) from error
    return chunk_gated_delta_rule


def fix_launches() -> list[str]:
    """Have every kernel launched as in :data:`LAUNCHES`, in this process.

    Of what the package would try on this GPU, the setting that agrees with most of it: some GPUs
    have fewer.

    Returns:
        Names of kernels that are not where they were.
    """
    missing = []
    for module, name, wanted in LAUNCHES:
        tuner = tuner_of(module, name)
        if tuner is None:
            missing.append(name)
        else:
            tuner.configs = [max(tuner.configs, key=partial(_agreement, wanted))]
    return missing


def tuner_of(module: str, name: str) -> Any:
    """The autotuner around a kernel, ``None`` where there is none."""
    try:
        kernel = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    while kernel is not None and not hasattr(kernel, "configs"):
        kernel = getattr(kernel, "fn", None)
    return kernel


def settings_of(config: Any) -> dict[str, int]:
    """What a ``triton.Config`` sets."""
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _agreement(wanted: dict[str, int], config: Any) -> int:
    found = settings_of(config)
    return sum(found.get(name) == value for name, value in wanted.items())
