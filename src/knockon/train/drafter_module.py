"""The drafter as it is trained: the shared DFlash backbone and a Domino head with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knockon.drafters.backbone import DFlashBackbone, DraftLayer
from knockon.drafters.config import DraftConfig
from knockon.errors import Refused
from knockon.layers.rotary import RotaryEmbedding, apply_rotary
from knockon.parallel import SingleRank
from knockon.train.frozen_target import FrozenTarget
from knockon.train.objective import Anchors, proposal_rows, visibility

# Rows of blocks that attend together; a whole tile of the attention kernels.
_ROWS_TOGETHER = 128


class DraftModule(nn.Module):
    """Backbone and, unless `config.domino` is None, the Domino head.

    Args:
        config: of the drafter. Only layers that see the whole block can be trained.
        dtype: in which the backbone computes. The head is FP32: it is small, and its state and sums
            are FP32 by contract.
    """

    def __init__(self, config: DraftConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if any(seen.causal or seen.window is not None for seen in config.backbone.visibility):
            raise Refused(
                "layer_types", "sliding_attention", "full_attention, in a drafter to be trained"
            )
        self.config = config
        self.feature_layers = config.target_layer_ids
        self.block_size = config.block_size
        self.domino = config.domino
        self.max_positions = config.max_positions
        self.backbone = DFlashBackbone(config.backbone, dtype, SingleRank())
        hidden = config.backbone.hidden_size
        self.rotary = RotaryEmbedding(
            config.backbone.rope, config.backbone.head_dim, config.backbone.max_positions
        )
        if config.domino is not None:
            gru, width = config.domino.gru_size, config.domino.correction_size
            self.prefix_gru = nn.GRU(hidden, gru, bias=False, batch_first=True)
            self.embed_proj = nn.Sequential(
                nn.Linear(hidden + gru, width, bias=False),
                nn.SiLU(),
                nn.Linear(width, config.vocab_size, bias=False),
            )
        self.requires_grad_(True)
        self.run_backbone: Callable[..., Tensor] = self._run_backbone

    @property
    def draft_layers(self) -> list[DraftLayer]:
        """The backbone's layers."""
        return [cast(DraftLayer, layer) for layer in self.backbone.layers]

    @property
    def correction_in(self) -> Tensor:
        """``W1 [E, H + G]``, columns for ``z`` first."""
        return cast(nn.Linear, self.embed_proj[0]).weight

    @property
    def correction_out(self) -> Tensor:
        """``W2 [V, E]``."""
        return cast(nn.Linear, self.embed_proj[2]).weight

    def compile_backbone(self) -> None:
        """Lets Inductor fuse the backbone; one compilation serves every sequence length."""
        self.run_backbone = torch.compile(self._run_backbone, dynamic=True)

    def initialise(self, seed: int, target: FrozenTarget | None = None) -> None:
        """Random weights; the correction's last matrix is zero: training starts from the base.

        Args:
            target: where given and of the same sizes, the draft layers start from its last layers
                and the final norm from its own: what the last layers write is what the head reads.

        Raises:
            Refused: layers of other sizes than the target's.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                elif name.startswith("embed_proj.2"):
                    parameter.zero_()
                else:
                    drawn = torch.empty(parameter.shape).normal_(
                        0, parameter.shape[1] ** -0.5, generator=generator
                    )
                    parameter.copy_(drawn)
        if target is not None:
            self._start_from(target)

    def _start_from(self, target: FrozenTarget) -> None:
        ours, theirs = self.config.backbone, target.config
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(ours, name) != getattr(theirs, name):
                raise Refused(
                    f"draft {name}",
                    getattr(ours, name),
                    f"the target's {getattr(theirs, name)} to start from it",
                )
        queries, keys = ours.num_heads * ours.head_dim, ours.num_kv_heads * ours.head_dim
        self.backbone.norm.load(target.norm)
        for index, source in enumerate(target.layers[-ours.num_layers :]):
            load = self.draft_layers[index].loaders()
            q, k, v = source.qkv.split((queries, keys, keys))
            gate, up = source.gate_up.chunk(2)
            for name, weight in (
                ("self_attn.q_proj", q), ("self_attn.k_proj", k), ("self_attn.v_proj", v),
                ("self_attn.o_proj", source.output), ("mlp.gate_proj", gate), ("mlp.up_proj", up),
                ("mlp.down_proj", source.down), ("input_layernorm", source.input_norm),
                ("post_attention_layernorm", source.post_norm),
            ):  # fmt: skip
                load[f"{name}.weight"](weight)

    def proposal_hidden(
        self,
        target: FrozenTarget,
        tokens: Tensor,
        hidden: Tensor,
        features: Tensor,
        anchors: Anchors,
    ) -> Tensor:
        """Rows that propose, of every block: ``[b, N, J, H]``; ``hidden`` is not read."""
        return self.proposals(self.block_hidden(target, tokens, features, anchors))

    def block_hidden(
        self, target: FrozenTarget, tokens: Tensor, features: Tensor, anchors: Anchors
    ) -> Tensor:
        """The backbone's rows of every block.

        Args:
            tokens: ``[b, T]`` int64.
            features: ``[b, T, F]``.
            anchors: ``N`` blocks a sequence.

        Returns:
            ``[b, N, L, H]``.
        """
        config = self.config
        batch, length = tokens.shape
        wanted, rows = anchors.position.shape[1], config.block_size
        together = min(wanted, max(1, _ROWS_TOGETHER // rows))
        blocks = -(-wanted // together) * together
        # Blocks that fill up the last group stand at 0, see no context and are dropped below.
        anchors = Anchors(*(F.pad(part, (0, blocks - wanted)) for part in anchors))
        first = tokens.gather(1, anchors.position)[..., None]
        masks = first.new_full((batch, blocks, rows - 1), config.mask_token_id)
        x = F.embedding(torch.cat((first, masks), -1).flatten(1), target.embedding)
        positions = (
            anchors.position[..., None] + torch.arange(rows, device=tokens.device)
        ).flatten(1)
        grouped = Anchors(*(part.reshape(-1, together) for part in anchors))
        seen = visibility(grouped, length, rows)
        bias = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill_(
            ~seen, float("-inf")
        )
        sharing = config.backbone.num_heads // config.backbone.num_kv_heads
        context = torch.arange(length, device=tokens.device)[None]
        z = self.run_backbone(
            x,
            features,
            bias.repeat(1, sharing, 1)[:, None],
            *self._angles(context),
            *self._angles(positions),
        )
        return z.view(batch, blocks, rows, -1)[:, :wanted]

    def _run_backbone(
        self,
        x: Tensor,
        features: Tensor,
        bias: Tensor,
        context_cos: Tensor,
        context_sin: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Rows ``x [b, N*L, H]`` to ``[b, N*L, H]``.

        Blocks attend in groups: none sees another's rows, so scores between all of them would be
        thrown away for the most part. Query heads that share keys are taken as more rows.

        Args:
            bias: ``[b * groups, 1, sharing * rows, T + rows]`` of a group's ``rows``.
        """
        context_keys, context_values = self.backbone.context_kv(features, context_cos, context_sin)
        batch, length, _, kv_heads, dim = context_keys.shape
        rows = bias.shape[-1] - length
        groups = x.shape[1] // rows

        def joined(context: Tensor, block: Tensor) -> Tensor:
            both = context[:, None].expand(-1, groups, -1, -1, -1), block.unflatten(1, (-1, rows))
            return torch.cat(both, 2).flatten(0, 1).transpose(1, 2)

        def rotate(heads: Tensor) -> Tensor:
            return apply_rotary(heads, cos, sin)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = self.draft_layers[layer].turned_heads(qkv, rotate)
            # [b * groups, kv_heads, sharing * rows, D]
            q = q.reshape(batch * groups, rows, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
            out = F.scaled_dot_product_attention(
                q.flatten(2, 3),
                joined(context_keys[:, :, layer], k),
                joined(context_values[:, :, layer], v),
                attn_mask=bias,
            )
            out = out.unflatten(2, (-1, rows)).permute(0, 3, 1, 2, 4)
            return out.reshape(batch, groups * rows, -1)

        return self.backbone(x, attend)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.rotary.cos.device != positions.device:
            self.rotary.cos = self.rotary.cos.to(positions.device)
            self.rotary.sin = self.rotary.sin.to(positions.device)
        return self.rotary.tables(positions)

    def proposals(self, hidden: Tensor) -> Tensor:
        """Rows ``z_j`` of ``[b, N, L, H]``: ``[b, N, J, H]``."""
        return proposal_rows(
            hidden, self.config.domino is not None and self.config.domino.shift_label
        )

    def correction_input(self, z: Tensor, teacher_embeddings: Tensor) -> Tensor:
        """``SiLU(W1 [z ; s])`` of every row, teacher-forced.

        Args:
            z: ``[M, J, H]``.
            teacher_embeddings: ``[M, J, H]`` of the true tokens at ``anchor .. anchor + J - 1``.

        Returns:
            ``[M, J, E]``.
        """
        states, _ = self.prefix_gru(teacher_embeddings.float())
        return self.embed_proj[1](self.embed_proj[0](torch.cat((z.float(), states), -1)))
