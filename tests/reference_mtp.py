"""An MTP head as the specification writes it, FP64: all rows afresh for every proposal."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.reference_speculation import Proposals, best_of, reference_target


class ReferenceMTP:
    """The head of a checkpoint folder, written out from the spec page.

    Args:
        folder: the head's, or the target's own that brings one along.
        target: the folder of the target.
    """

    def __init__(self, folder: Path, target: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        held = load_file(folder / "model.safetensors")
        self.w = {k: v.double() for k, v in held.items() if k.startswith("mtp.")}
        self.target = reference_target(target)
        # Qwen3.5: zero-centred norms, a gate beside the queries, rotation of a part of each head.
        self.hybrid = "qwen3_5" in self.config["model_type"]

    def features(self, tokens: list[int]) -> Tensor:
        """``[n, H + 1]``: the hidden state after the final norm, and the token."""
        ids = torch.tensor([tokens])
        hidden = self.target.model(ids, use_cache=False).last_hidden_state[0]
        return torch.cat([hidden, ids[0, :, None].double()], 1)

    def propose(self, features: Tensor, bonus: int, steps: int, pool_size: int = 0) -> Proposals:
        """The first ``steps`` proposals.

        Row ``t`` stands at position ``t``: the state at ``t`` and the token at ``t + 1``.
        """
        states, tokens = list(features[:, :-1]), [*features[1:, -1].long().tolist(), bonus]
        proposals: list[int] = []
        margins: list[float] = []
        for _ in range(steps):
            out = self._last(torch.stack(states), torch.tensor(tokens))
            best = best_of([self.target.get_output_embeddings()(out)])
            proposals += best.tokens
            margins += best.margins
            states.append(out)
            tokens += best.tokens
        return Proposals(proposals, margins)

    def _last(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The normed output of the last of ``n`` rows: ``[H]``."""
        embedded = self.target.get_input_embeddings()(tokens)
        both = [
            self._norm(embedded, "pre_fc_norm_embedding"),
            self._norm(states, "pre_fc_norm_hidden"),
        ]
        x = torch.cat(both, -1) @ self._weight("fc").t()
        normed = self._norm(x, "layers.0.input_layernorm")
        dim, rows = self.config["head_dim"], torch.arange(len(x))

        def project(name: str) -> Tensor:
            return normed @ self._weight(f"layers.0.self_attn.{name}_proj").t()

        def heads(name: str) -> Tensor:
            found = project(name).unflatten(-1, (-1, dim))
            if name == "q" and self.hybrid:
                found = found[:, 0::2]
            found = found.transpose(0, 1)
            norm = f"layers.0.self_attn.{name}_norm"
            return self._norm(found, norm) if f"mtp.{norm}.weight" in self.w else found

        q, k, v = self._rotate(heads("q"), rows), self._rotate(heads("k"), rows), heads("v")
        repeat = len(q) // len(k)
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        scores = (q @ k.transpose(1, 2) / math.sqrt(dim)).masked_fill(
            rows > rows[:, None], -torch.inf
        )
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        if self.hybrid:
            gates = project("q").unflatten(-1, (-1, dim))[:, 1::2]
            attended = attended * gates.flatten(1).sigmoid()
        x = x + attended @ self._weight("layers.0.self_attn.o_proj").t()
        normed = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = (
            normed @ self._weight(f"layers.0.mlp.{name}_proj").t() for name in ("gate", "up")
        )
        x = x + (F.silu(gate) * up) @ self._weight("layers.0.mlp.down_proj").t()
        return self._norm(x, "norm")[-1]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.hybrid:
            rope = self.config.get("rope_parameters", {})
            part = int(x.shape[-1] * rope.get("partial_rotary_factor", 0.25))
            return torch.cat([self._turn(x[..., :part], positions), x[..., part:]], -1)
        return self._turn(x, positions)

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        base = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        angles = positions[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
        a, b = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config["rms_norm_eps"]
        gain = self._weight(name) + self.hybrid
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain

    def _weight(self, name: str) -> Tensor:
        return self.w[f"mtp.{name}.weight"]
