"""The weights of a Domino head: a GRU over the proposed prefix and a low-rank correction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knockon.errors import Refused

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class DominoHead:
    """Weights and fixed choices of one Domino head (arXiv 2605.29707).

    Attributes:
        gru_input: ``[3G, H]``, gates from an embedding, in PyTorch's order reset, update, new.
        gru_state: ``[3G, G]``, gates from the previous state, same order. Neither has a bias.
        correction_in: ``W1 [E, H + G]``, columns for ``z`` first, then for the state.
        correction_out: ``W2 [V, E]``.
        prefix_len: ``p``, how many first proposals are the plain argmax of the base logits.
        shift_label: ``True`` when row ``k`` of the draft predicts the token at ``k + 1``.

    Raises:
        Refused: shapes that disagree, dtypes or devices that differ, ``prefix_len < 0``, or fields
            of another type.
    """

    gru_input: Tensor
    gru_state: Tensor
    correction_in: Tensor
    correction_out: Tensor
    prefix_len: int = 1
    shift_label: bool = False

    def __post_init__(self) -> None:
        weights = {
            "gru_input": self.gru_input,
            "gru_state": self.gru_state,
            "correction_in": self.correction_in,
            "correction_out": self.correction_out,
        }
        for name, weight in weights.items():
            if not isinstance(weight, Tensor):
                raise Refused(f"head.{name}", type(weight).__name__, "a tensor")
        for name, weight in weights.items():
            if weight.dim() != 2 or 0 in weight.shape:
                raise Refused(f"head.{name}", tuple(weight.shape), "a non-empty matrix")
            if weight.dtype != self.dtype or weight.dtype not in FLOAT_DTYPES:
                wanted = f"one floating dtype for the whole head ({self.dtype})"
                raise Refused(f"head.{name}", weight.dtype, wanted)
            if weight.device != self.device:
                raise Refused(f"head.{name}", str(weight.device), f"on {self.device}")
        width = self.gru_size
        expected = {
            "gru_state": (3 * width, width),
            "gru_input": (3 * width, self.hidden_size),
            "correction_in": (self.correction_size, self.hidden_size + width),
        }
        for name, shape in expected.items():
            if tuple(weights[name].shape) != shape:
                raise Refused(f"head.{name}", tuple(weights[name].shape), f"shape {shape}")
        p = self.prefix_len
        if not isinstance(p, int) or isinstance(p, bool) or p < 0:
            raise Refused("head.prefix_len", p, "an int of at least 0")
        if not isinstance(self.shift_label, bool):
            raise Refused("head.shift_label", self.shift_label, "True or False")

    @property
    def hidden_size(self) -> int:
        """``H``, the width of embeddings and of the draft's rows."""
        return self.gru_input.shape[1]

    @property
    def gru_size(self) -> int:
        """``G``."""
        return self.gru_state.shape[1]

    @property
    def correction_size(self) -> int:
        """``E``."""
        return self.correction_out.shape[1]

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.correction_out.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.gru_input.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """What state, gates, corrections and sums are kept in: FP32, or FP64 for an FP64 head."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def device(self) -> torch.device:
        return self.gru_input.device
