"""Speculative decoding as the specification writes it: no cache, no batch, dense attention, FP64.

Nothing here is shared with the engine but the files on disk. The target is ``transformers``' own;
the drafter is written out from the spec page. From both follows what a greedy speculative run must
emit *and* how long each acceptance must be, which is what tells a healthy drafter from one that is
fed wrong states and still gives the right text.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


@cache
def reference_target(folder: Path) -> PreTrainedModel:
    """The target of a folder, by ``transformers``, in FP64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model.eval().requires_grad_(False)


def reference_logits(folder: Path, tokens: list[int]) -> Tensor:
    """``[n, V]`` FP64: row ``i`` predicts the token at ``i + 1``."""
    return reference_target(folder)(torch.tensor([tokens]), use_cache=False).logits[0]


class Proposals(NamedTuple):
    """What the drafter proposes, and by how much each token won over the next best."""

    tokens: list[int]
    margins: list[float]


class Reference(Protocol):
    """A drafter without cache or batch."""

    def features(self, tokens: list[int]) -> Tensor:
        """``[n, F]``: what it is told of each verified token."""
        ...

    def propose(self, features: Tensor, bonus: int, steps: int, pool_size: int = 0) -> Proposals:
        """The first ``steps`` proposals after ``bonus``, which follows the verified tokens."""
        ...


class ReferenceDrafter:
    """The drafter of a checkpoint folder, written out from the spec page.

    Args:
        folder: the drafter's.
        target: the folder of the target whose embedding and head it borrows.
    """

    def __init__(self, folder: Path, target: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.extra = self.config["dflash_config"]
        self.w = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
        self.target = reference_target(target)
        self.block_size: int = self.config["block_size"]

    def features(self, tokens: list[int]) -> Tensor:
        """``[n, F]``: the residual stream after each of the target layers, side by side."""
        ids = torch.tensor([tokens])
        states = self.target(ids, output_hidden_states=True, use_cache=False).hidden_states
        # hidden_states[0] is the embedding, so layer i (0-based) leaves hidden_states[i + 1].
        return torch.cat([states[i + 1][0] for i in self.extra["target_layer_ids"]], dim=-1)

    def block(self, features: Tensor, bonus: int) -> Tensor:
        """``Z [L, H]`` of the block that begins with ``bonus`` after ``n`` verified tokens.

        Args:
            features: ``[n, F]`` of exactly the verified tokens.
        """
        n, length = len(features), self.block_size
        context = self._norm(features @ self.w["fc.weight"].t(), "hidden_norm.weight")
        ids = torch.tensor([bonus] + [self.extra["mask_token_id"]] * (length - 1))
        x = self.target.get_input_embeddings()(ids)
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(layer, x, context, n)
        return self._norm(x, "norm.weight")

    def propose(self, features: Tensor, bonus: int, steps: int, pool_size: int = 0) -> Proposals:
        """The first ``steps`` proposals."""
        z = self.block(features, bonus)
        domino = self.extra.get("projector_type") == "domino"
        shifted = domino and self.extra["shift_label"]
        rows = z[:steps] if shifted else z[1 : 1 + steps]
        base = self.target.get_output_embeddings()(rows)
        if not domino:
            return best_of(list(base))
        return self._roll_out(rows, base, bonus, pool_size)

    def _roll_out(self, rows: Tensor, base: Tensor, bonus: int, pool_size: int) -> Proposals:
        prefix, vocab = self.extra["pure_draft_prefix_len"], base.shape[-1]
        allowed = torch.ones(vocab, dtype=torch.bool)
        if 0 < pool_size < vocab and len(base) > prefix:
            score = base[prefix:].amax(0)
            allowed[:] = False
            allowed[score.sort(descending=True, stable=True).indices[:pool_size]] = True
        gru = torch.nn.GRU(
            rows.shape[1], self.extra["gru_hidden_dim"], bias=False, batch_first=True
        ).double()
        gru.weight_ih_l0.data = self.w["prefix_gru.weight_ih_l0"]
        gru.weight_hh_l0.data = self.w["prefix_gru.weight_hh_l0"]
        embed = self.target.get_input_embeddings()
        tokens: list[int] = []
        margins: list[float] = []
        for j, z in enumerate(rows):
            logits = base[j]
            if j >= prefix:
                with torch.no_grad():
                    state = gru(embed(torch.tensor([[bonus, *tokens]])))[1][0, 0]
                hidden = F.silu(self.w["embed_proj.0.weight"] @ torch.cat([z, state]))
                logits = logits + self.w["embed_proj.2.weight"] @ hidden
                logits = logits.masked_fill(~allowed, -torch.inf)
            best = best_of([logits])
            tokens += best.tokens
            margins += best.margins
        return Proposals(tokens, margins)

    def _layer(self, layer: int, x: Tensor, context: Tensor, n: int) -> Tensor:
        def weight(name: str) -> Tensor:
            return self.w[f"layers.{layer}.{name}.weight"]

        def heads(x: Tensor, name: str) -> Tensor:
            return (
                (x @ weight(f"self_attn.{name}_proj").t()).unflatten(-1, (-1, dim)).transpose(0, 1)
            )

        dim, length = self.config["head_dim"], len(x)
        h = self._norm(x, f"layers.{layer}.input_layernorm.weight")
        both = torch.cat([context, h])  # the block's own keys come after the context's
        block_at = torch.arange(n, n + length)
        q = self._norm(heads(h, "q"), f"layers.{layer}.self_attn.q_norm.weight")
        k = self._norm(heads(both, "k"), f"layers.{layer}.self_attn.k_norm.weight")
        q, k, v = (
            self._rotate(q, block_at),
            self._rotate(k, torch.arange(n + length)),
            heads(both, "v"),
        )
        repeat = len(q) // len(k)
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(dim)
        scores = scores.masked_fill(~self._visible(layer, block_at, n + length), -torch.inf)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + attended @ weight("self_attn.o_proj").t()
        h = self._norm(x, f"layers.{layer}.post_attention_layernorm.weight")
        gated = F.silu(h @ weight("mlp.gate_proj").t()) * (h @ weight("mlp.up_proj").t())
        return x + gated @ weight("mlp.down_proj").t()

    def _visible(self, layer: int, block_at: Tensor, total: int) -> Tensor:
        """``[L, n + L]``: which positions each row of the block sees."""
        keys = torch.arange(total)
        sliding = self.config["layer_types"][layer] == "sliding_attention"
        causal = self.extra.get("causal", self.config.get("is_causal", sliding))
        seen = torch.ones(len(block_at), total, dtype=torch.bool)
        if causal:
            seen &= keys <= block_at[:, None]
        if sliding:
            seen &= keys >= block_at[:, None] - (self.config["sliding_window"] - 1)
        return seen

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        base = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        angles = positions[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
        a, b = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config["rms_norm_eps"]
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.w[name]


def best_of(rows: list[Tensor]) -> Proposals:
    two = [row.topk(2) for row in rows]
    return Proposals(
        [int(t.indices[0]) for t in two], [float(t.values[0] - t.values[1]) for t in two]
    )


class Speculation(NamedTuple):
    """A greedy speculative run.

    Attributes:
        accept_lengths: tokens kept per verification.
        margin: the smallest lead, of target or drafter, that any of it hung on.
    """

    accept_lengths: list[int]
    margin: float


def greedy_margin(target: Path, prompt: list[int], output: list[int]) -> float:
    """Hold ``output`` to be what greedy decoding gives; the smallest lead on the way."""
    logits = reference_logits(target, prompt + output)[len(prompt) - 1 : -1]
    best = best_of(list(logits))
    for i, (ours, theirs) in enumerate(zip(output, best.tokens, strict=True)):
        assert ours == theirs, (
            f"token {i} of the output is {ours} with logit {logits[i, ours]:.6f}, the target's is "
            f"{theirs} with {logits[i, theirs]:.6f}, which leads by {best.margins[i]:.2g}"
        )
    return min(best.margins)


def speculate_greedily(
    target: Path,
    drafter: Reference,
    prompt: list[int],
    output: list[int],
    width: int,
    pool_size: int = 0,
) -> Speculation:
    """How a run at verify width ``width`` must come to ``output``, which must be the greedy one."""
    margin = greedy_margin(target, prompt, output)
    tokens = prompt + output
    features = drafter.features(tokens)
    accept_lengths: list[int] = []
    n = len(prompt)  # verified tokens; the one at n is the bonus, chosen by the prefill
    while n + 1 < len(tokens):
        proposed = drafter.propose(features[:n], tokens[n], width - 1, pool_size)
        truth = tokens[n + 1 :]
        accepted = 0
        for proposal, lead in zip(proposed.tokens, proposed.margins, strict=True):
            if accepted == len(truth):
                break
            margin = min(margin, lead)
            if proposal != truth[accepted]:
                break
            accepted += 1
        gained = min(accepted + 1, len(truth))
        accept_lengths.append(gained)
        n += gained
    return Speculation(accept_lengths, margin)
