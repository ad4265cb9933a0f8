"""Stands for flash-linear-attention where there is none: its interface, computed by tokens."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


class FakeRule:
    """``chunk_gated_delta_rule`` as its documentation has it; remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> tuple[Tensor, Tensor | None]:
        self.calls.append(given)
        return naive(**given)


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The rule token by token in FP64.

    Args:
        q, k: ``[B, T, H, K]``. v: ``[B, T, HV, V]``. g, beta: ``[B, T, HV]``, ``g`` in log space.
        scale: of queries; ``K^-0.5`` by default.
        initial_state: ``[B, HV, K, V]``; zeros by default.

    Returns:
        Outputs as ``v`` in the dtype of ``q``, and the last state in FP32 or none.
    """
    batch, rows, heads, key = q.shape
    values, value = v.shape[2:]
    group = values // heads
    scale = key**-0.5 if scale is None else scale
    state = q.new_zeros((batch, values, key, value), dtype=torch.float64)
    if initial_state is not None:
        assert initial_state.shape == state.shape
        state += initial_state
    out = torch.empty_like(v, dtype=torch.float64)
    for t in range(rows):
        for head in range(values):
            query, one = (x[:, t, head // group].double() for x in (q, k))
            held = state[:, head] * g[:, t, head].double().exp()[:, None, None]
            said = torch.einsum("bk,bkv->bv", one, held)
            written = (v[:, t, head].double() - said) * beta[:, t, head, None]
            state[:, head] = held + torch.einsum("bk,bv->bkv", one, written)
            out[:, t, head] = torch.einsum("bk,bkv->bv", query * scale, state[:, head])
    return out.to(q.dtype), state.float() if output_final_state else None


def install(monkeypatch: pytest.MonkeyPatch) -> FakeRule:
    """Have it imported in place of the package, which then seems to be there, in its 0.6.0."""
    rule = FakeRule()
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = rule  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name == "fla" or name.startswith("fla.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return rule
