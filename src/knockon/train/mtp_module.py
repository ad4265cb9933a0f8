"""The MTP head as it is trained: the served head, unrolled from sampled anchors with gradients.

Rows that the target has verified are run from its true hidden states; from an anchor on, every
further row reads the head's own output before it, as in serving. Tokens are the true ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knockon.drafters.mtp import MTPHead
from knockon.drafters.mtp_config import MTPConfig
from knockon.errors import Refused
from knockon.layers.fused.silu_mul import silu_mul
from knockon.layers.rotary import RotaryEmbedding, apply_rotary
from knockon.parallel import SingleRank
from knockon.train.frozen_target import FrozenTarget
from knockon.train.objective import Anchors, teacher_tokens

NextToken = Callable[[int, Tensor], Tensor]
"""``(j, z_j [b, N, H]) -> [b, N]``: the token that follows row ``j``."""


class Heads(NamedTuple):
    """Rotated queries and keys, and values, ``[b, heads, rows, D]``; keys spread over groups."""

    q: Tensor
    k: Tensor
    v: Tensor


class MTPModule(nn.Module):
    """An :class:`~knockon.drafters.mtp.MTPHead` with gradients.

    Args:
        config: of the head.
        steps: proposals that it is unrolled for, ``S``.
        dtype: in which it computes.
    """

    feature_layers: tuple[int, ...] = ()
    domino = None

    def __init__(self, config: MTPConfig, steps: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.head = MTPHead(config, dtype, SingleRank())
        if self.head.layer.head_norms() is not None:
            raise Refused(
                "architecture", config.layer.architecture, "'llama', to train an MTP head"
            )
        self.block_size = steps + 1
        self.max_positions = config.max_positions
        self.rotary = RotaryEmbedding(
            config.layer.rope, config.head_dim, config.max_positions + self.block_size
        )
        self.requires_grad_(True)

    def compile_backbone(self) -> None:
        """Nothing is compiled: the rows of a step hang on those of the step before."""

    def initialise(self, seed: int, target: FrozenTarget | None = None) -> None:
        """Random weights.

        Args:
            target: where given, the layer starts from its last one, the final norm from its own,
                and the layer reads the sum of both inputs.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    drawn = torch.empty(parameter.shape).normal_(
                        0, parameter.shape[1] ** -0.5, generator=generator
                    )
                    parameter.copy_(drawn)
            if target is not None:
                last, layer = target.layers[-1], self.head.layer
                for ours, theirs in (
                    (layer.input_norm, last.input_norm),
                    (layer.qkv, last.qkv),
                    (layer.output, last.output),
                    (layer.mlp_norm, last.post_norm),
                    (layer.gate_up, last.gate_up),
                    (layer.down, last.down),
                    (self.head.norm, target.norm),
                ):
                    ours.weight.copy_(theirs)
                self.head.fc.weight.copy_(torch.eye(self.head.fc.out_features).repeat(1, 2))

    def proposal_hidden(
        self,
        target: FrozenTarget,
        tokens: Tensor,
        hidden: Tensor,
        features: Tensor,
        anchors: Anchors,
    ) -> Tensor:
        """Rows that propose, teacher-forced: ``[b, N, S, H]``.

        Args:
            tokens: ``[b, T]`` int64.
            hidden: ``[b, T, H]``, the target's after its final norm.
            features: none.
            anchors: ``N`` a sequence; the anchor's own row proposes the token after it.
        """
        steps = self.block_size - 1
        true = teacher_tokens(tokens, anchors, steps + 1)
        return self.unroll(target, tokens, hidden, anchors, lambda j, z: true[..., j + 1])

    def unroll(
        self,
        target: FrozenTarget,
        tokens: Tensor,
        hidden: Tensor,
        anchors: Anchors,
        following: NextToken,
    ) -> Tensor:
        """``S`` rows from every anchor, each of the row before it: ``[b, N, S, H]``.

        Args:
            following: the token to go on with; not asked after the last row.
        """
        blocks = anchors.position.shape[1]
        rows = torch.arange(tokens.shape[1], device=tokens.device)[None]
        # The last row has no token after it, and is before no anchor: it is seen by none.
        context = self._heads(self._enter(hidden, F.pad(tokens[:, 1:], (0, 1)), target), rows)
        # The row of the token at position p reads the state at p - 1 and stands there.
        first = (anchors.position - 1).clamp(min=0)
        state = hidden.gather(1, first[..., None].expand(-1, -1, hidden.shape[-1]))
        token = tokens.gather(1, anchors.position)
        keys, values = [context.k], [context.v]
        seen = [rows[:, None] <= first[..., None]]
        own = torch.eye(blocks, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        found = []
        for step in range(self.block_size - 1):
            x = self._enter(state, token, target)
            heads = self._heads(x, first + step)
            if step:  # the first row is among the context's
                keys.append(heads.k)
                values.append(heads.v)
                seen.append(own)
            mask = torch.cat(seen, -1)[:, None]
            bias = torch.zeros(mask.shape, dtype=x.dtype, device=x.device)
            out = F.scaled_dot_product_attention(
                heads.q,
                torch.cat(keys, 2),
                torch.cat(values, 2),
                attn_mask=bias.masked_fill_(~mask, float("-inf")),
            )
            state = self._leave(x, out.transpose(1, 2).flatten(2))
            found.append(state)
            if step + 2 < self.block_size:
                token = following(step, state)
        return torch.stack(found, 2)

    def published(self) -> dict[str, Tensor]:
        """Weights by their published names."""
        head, layer = self.head, self.head.layer
        q, k, v = layer.qkv.weight.split(layer.qkv.sizes)
        gate, up = layer.gate_up.weight.split(layer.gate_up.sizes)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.output.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight,
            "input_layernorm": layer.input_norm.weight,
            "post_attention_layernorm": layer.mlp_norm.weight,
        }
        return {
            "mtp.fc.weight": head.fc.weight,
            "mtp.pre_fc_norm_embedding.weight": head.embedding_norm.weight,
            "mtp.pre_fc_norm_hidden.weight": head.hidden_norm.weight,
            "mtp.norm.weight": head.norm.weight,
        } | {f"mtp.layers.0.{name}.weight": weight for name, weight in parts.items()}

    def _enter(self, state: Tensor, token: Tensor, target: FrozenTarget) -> Tensor:
        return self.head.enter(state, F.embedding(token, target.embedding))

    def _heads(self, x: Tensor, positions: Tensor) -> Heads:
        """``x [b, rows, H]`` at ``positions [b or 1, rows]``."""
        layer, config = self.head.layer, self.config
        qkv = layer.qkv(layer.input_norm(x)).split(layer.qkv.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, config.head_dim)) for part in qkv)
        if self.rotary.cos.device != x.device:
            self.rotary.cos = self.rotary.cos.to(x.device)
            self.rotary.sin = self.rotary.sin.to(x.device)
        cos, sin = self.rotary.tables(positions)
        group = config.num_heads // config.num_kv_heads

        def spread(heads: Tensor) -> Tensor:
            return heads.repeat_interleave(group, dim=2).transpose(1, 2)

        return Heads(
            apply_rotary(q, cos, sin).transpose(1, 2), spread(apply_rotary(k, cos, sin)), spread(v)
        )

    def _leave(self, x: Tensor, attended: Tensor) -> Tensor:
        layer = self.head.layer
        x, normed = layer.mlp_norm.add(x, layer.output(attended))
        return self.head.norm.add(x, layer.down(silu_mul(layer.gate_up(normed))))[1]
