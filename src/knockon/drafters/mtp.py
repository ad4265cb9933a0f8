"""Multi-token prediction: one decoder layer that is run again for every proposal.

*Rows.* The row of the token at position ``p`` reads the target's hidden state at ``p - 1`` (after
the final norm) and that token's embedding, stands at position ``p - 1`` in the rotary embedding,
and predicts the token at ``p + 1``. Its keys and values are kept under ``p``, not ``p - 1``: they
hang on no token past ``p``, so whoever shares a prefix's pages shares these too. There is no row
for the first token; no other row sees what lies in its place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from knockon.drafters.base import DraftReport, KVShape
from knockon.drafters.mtp_config import MTPConfig
from knockon.drafters.proposing_head import ProposingHead
from knockon.layers.attention import AttentionBackend, BlockPlan, PagedKV, Visibility
from knockon.layers.linear import ReplicatedLinear
from knockon.layers.norm import RMSNorm
from knockon.layers.rotary import RotaryEmbedding, Rotation
from knockon.models.decoder import FINAL_HIDDEN
from knockon.models.decoder_layer import AttentionLayer
from knockon.models.target import LAYERS, Target
from knockon.parallel import Group, HeadShard


class MTPHead(nn.Module):
    """``norm(layer(fc [norm(embedding) ; norm(hidden)]))``.

    Args:
        config: the head's configuration.
        dtype: of weights and activations.
        group: the ranks that share the target.
    """

    def __init__(self, config: MTPConfig, dtype: torch.dtype, group: Group) -> None:
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        heads = HeadShard.deal(config.num_heads, config.num_kv_heads, group.size, group.rank)
        self.kv_heads = heads.kv_count
        centred = config.layer.zero_centred_norms
        self.embedding_norm = RMSNorm(size, eps, dtype, centred)
        self.hidden_norm = RMSNorm(size, eps, dtype, centred)
        self.fc = ReplicatedLinear(2 * size, size, False, dtype)
        layer = LAYERS[config.layer.architecture](config.layer, 0, heads, dtype, group)
        assert isinstance(layer, AttentionLayer)
        self.layer: AttentionLayer = layer
        self.layer.visibility = Visibility(causal=True, first=1)
        self.norm = RMSNorm(size, eps, dtype, centred)

    def enter(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What the layer reads, of the state before a token and its embedding, ``[B, T, H]``."""
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        x: Tensor = self.fc(both)
        return x

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        kv: PagedKV,
        plan: BlockPlan,
        attention: AttentionBackend,
    ) -> Tensor:
        """From :meth:`enter` to the normed output ``[B, T, H]``, which the LM head reads."""
        x, normed = self.layer.input_norm.add(x, None)
        x, delta = self.layer(x, normed, rotation, kv, plan, attention)
        return self.norm.add(x, delta)[1]

    def write_kv(self, x: Tensor, rotation: Rotation, kv: PagedKV, slots: Tensor) -> None:
        """Keys and values of rows, which hang on nothing but what the layer reads of them."""
        self.layer.write_kv(self.layer.input_norm(x), rotation, kv, slots)

    def pack(self) -> None:
        """Repack the linears for CPU inference, once loaded."""
        for module in self.modules():
            if isinstance(module, ReplicatedLinear):
                module.pack()

    def loaders(self) -> dict[str, Callable[[Tensor], None]]:
        """Published name (Qwen3.5's) to the function that takes its full tensor."""
        found: dict[str, Callable[[Tensor], None]] = {
            "mtp.fc.weight": self.fc.load,
            "mtp.pre_fc_norm_embedding.weight": self.embedding_norm.load,
            "mtp.pre_fc_norm_hidden.weight": self.hidden_norm.load,
            "mtp.norm.weight": self.norm.load,
        }
        for name, load in self.layer.loaders().items():
            found[f"mtp.layers.0.{name}"] = load
        return found


class MTPDrafter:
    """Unrolls an MTP head: each proposal and the output it came from make the next.

    Args:
        config: the head's configuration, already held against the target.
        head: its loaded weights.
        target: whose embedding it borrows.
        proposing: whose LM head chooses.
        backend: attention over the draft KV.
        steps: proposals that it makes at most, ``S``.
        max_positions: positions that requests may reach; the tables get a block's slack beyond.
    """

    name = "mtp"
    feature_layers = (FINAL_HIDDEN,)

    def __init__(
        self,
        config: MTPConfig,
        head: MTPHead,
        target: Target,
        proposing: ProposingHead,
        backend: AttentionBackend,
        steps: int,
        max_positions: int,
    ) -> None:
        self.config = config
        self.head = head
        self.target = target
        self.proposing = proposing
        self.backend = backend
        self.block_size = steps + 1
        self.kv_shape = KVShape(1, head.kv_heads, config.head_dim)
        self.rotary = RotaryEmbedding(
            config.layer.rope, config.head_dim, max_positions + 2 * self.block_size, target.device
        )
        self._kv = PagedKV(torch.empty(0), torch.empty(0))
        self._hidden = torch.empty(0)

    def bind_kv(self, num_slots: int) -> None:
        """Allocate draft KV, and the target's hidden states, for that many slots."""
        dtype, device = self.target.dtype, self.target.device
        self._kv = PagedKV.allocate(num_slots, *self.kv_shape[1:], dtype, device)
        size = self.config.layer.hidden_size
        self._hidden = torch.zeros((num_slots, size), dtype=dtype, device=device)

    def observe(self, features: Tensor, tokens: Tensor, plan: BlockPlan) -> None:
        """Run rows just verified from true hidden states: their keys and values, no outputs.

        What :meth:`propose` wrote in their places came from the head's own states.
        """
        before = torch.cat([self._hidden_before(plan), features[:, :-1]], 1)
        self._hidden.index_copy_(0, plan.slots, features.flatten(0, 1))
        x = self.head.enter(before, self.target.embed(tokens))
        self.head.write_kv(x, self._rotation(plan.positions), self._kv, plan.slots)

    def propose(self, bonus: Tensor, plan: BlockPlan, steps: int) -> Tensor:
        """The argmax of every output ``[B, steps]``; the first comes from the bonus's own row."""
        hidden = self._hidden_before(plan)
        token = bonus.unsqueeze(1)
        proposals = []
        for row in plan.single_rows()[:steps]:
            x = self.head.enter(hidden, self.target.embed(token))
            hidden = self.head(x, self._rotation(row.positions), self._kv, row, self.backend)
            token = self.proposing.argmax(hidden)
            proposals.append(token)
        return torch.cat(proposals, 1) if proposals else bonus.new_empty((len(bonus), 0))

    def _hidden_before(self, plan: BlockPlan) -> Tensor:
        """The target's state before each request's first row: ``[B, 1, H]``.

        Before position 0 there is none; whatever is found ends in the row that nobody sees.
        """
        position = (plan.positions[:, :1] - 1).clamp(min=0)
        page = plan.page_table.gather(1, position // plan.page_size)
        slots = page * plan.page_size + position % plan.page_size
        return self._hidden.index_select(0, slots.flatten()).unsqueeze(1)

    def _rotation(self, positions: Tensor) -> Rotation:
        return Rotation(self.rotary, (positions - 1).clamp(min=0))

    def exchange_for(self, batch: int, steps: int) -> None:
        """No rollout, no choice: the LM head gathers its logits."""

    def report(self) -> DraftReport:
        """The head that proposes, and what a copy of it takes."""
        return self.proposing.report()
