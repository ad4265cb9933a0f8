"""The Domino drafter as a model of vLLM's: its DFlash backbone, and the weights of the head."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

from knockon.drafters.config import DominoConfig
from knockon.drafters.load import head_shapes
from knockon.drafters.published_weights import sort_published
from knockon.errors import Refused
from knockon.integrations.vllm.checkpoint import read_checkpoint
from knockon.rollout import DominoHead


class DominoWeights(nn.Module):
    """The Domino head's weights, whole on every rank, in vLLM's default dtype and device."""

    def __init__(self, config: DominoConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.weights = nn.ParameterDict(
            {
                _parameter_name(name): nn.Parameter(torch.empty(shape), requires_grad=False)
                for name, shape in head_shapes(config, hidden_size, vocab_size).items()
            }
        )

    def load(self, full: dict[str, Tensor]) -> None:
        """Copy checkpoint tensors by their published names."""
        with torch.no_grad():
            for name, tensor in full.items():
                self.weights[_parameter_name(name)].copy_(tensor)

    def head(self) -> DominoHead:
        """These weights as the rollout takes them, nothing copied."""
        found = {name: weight.detach() for name, weight in self.weights.items()}
        return DominoHead(
            gru_input=found["prefix_gru_weight_ih_l0"],
            gru_state=found["prefix_gru_weight_hh_l0"],
            correction_in=found["embed_proj_0_weight"],
            correction_out=found["embed_proj_2_weight"],
            prefix_len=self.config.prefix_len,
            shift_label=self.config.shift_label,
        )


class DominoDraftModel(DFlashQwen3ForCausalLM):
    """vLLM's DFlash drafter, plus the weights that its choice of tokens needs.

    Attributes:
        draft_config: the checkpoint's configuration.
        domino: the head's weights.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.draft_config = read_checkpoint(vllm_config.speculative_config.draft_model_config)
        domino = self.draft_config.domino
        if domino is None:
            raise Refused("dflash_config.projector_type", "dflash", "'domino'")
        hidden = self.draft_config.backbone.hidden_size
        self.domino = DominoWeights(domino, hidden, self.draft_config.vocab_size)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a checkpoint in the published format.

        Raises:
            Refused: see :func:`~knockon.drafters.published_weights.sort_published`.
        """
        found = sort_published(weights, self.draft_config, "Domino drafter")
        super().load_weights(found.backbone.items())
        self.domino.load(found.head)
        norms = torch.stack([layer.self_attn.k_norm.weight.detach() for layer in self.model.layers])
        if norms.device.type == "cpu":
            # vLLM's CPU kernel gives every layer's context keys the norm of the first.
            epsilon = self.draft_config.backbone.rms_norm_eps
            self.model._normalize_context_k = lambda keys: norm_by_layer(keys, norms, epsilon)


def norm_by_layer(keys: Tensor, weights: Tensor, epsilon: float) -> Tensor:
    """RMS-norm ``keys [layers, T, kv_heads, D]``, each layer by its own ``weights [layers, D]``."""
    wide = keys.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return normed.to(keys.dtype) * weights[:, None, None, :]


def _parameter_name(published: str) -> str:
    return published.replace(".", "_")
