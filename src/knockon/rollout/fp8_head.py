"""An FP8 copy of an LM head, for proposals: half the bytes of BF16 to read for every block.

It changes which tokens are proposed, never which are emitted: the target verifies with its own
head, which stays as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.rollout.fp8_rows import CODE, quantise_rows, quantise_rows_plain

LEAST_CAPABILITY = (8, 9)  # FP8 on the tensor cores
MULTIPLE = 16  # what torch._scaled_mm asks of both sides of a weight
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROWS_AT_A_TIME = 8192  # widened to FP32, so that no second copy of the head is ever held


def fp8_obstacle(device: torch.device) -> str:
    """Why FP8 heads cannot run on ``device``; empty where they can.

    A CPU multiplies the codes in FP32, which shows what a GPU proposes but is slower than the head
    itself.
    """
    if device.type == "cpu":
        return ""
    if device.type != "cuda" or torch.version.hip is not None:
        return "FP8 heads run on CUDA GPUs and CPUs"
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        wanted = ".".join(map(str, LEAST_CAPABILITY))
        return f"compute capability {found[0]}.{found[1]} multiplies no FP8, which needs {wanted}"
    return ""


class FP8Head:
    """Logits out of FP8 rows of the LM head and FP8 rows of ``x``, each row with a scale::

        logit[n, v] = scale_x[n] * scale_w[v] * sum_h code_x[n, h] * code_w[v, h]

    summed in FP32 (on a GPU by tensor cores, whose sums of FP8 products keep fewer bits), rounded
    to BF16 and given in the dtype of the weight. ``DominoRollout`` takes it as its ``lm_head``.

    Args:
        weight: this rank's ``[num_padded, H]`` in BF16, FP16 or FP32, which is read once and not
            kept; ``H`` a multiple of 16.

    Attributes:
        num_rows: ``num_padded``.
        hidden_size: ``H``.
        dtype: of the logits.
        codes: ``[rows, H]`` FP8; rows are padded to a multiple of 16 with zeros.
        scales: ``[1, rows]`` FP32.
        num_bytes: memory of codes and scales.

    Raises:
        Refused: a weight or a device that FP8 products do not take.
    """

    def __init__(self, weight: Tensor) -> None:
        if not isinstance(weight, Tensor):
            raise Refused("FP8 head: weight", type(weight).__name__, "a tensor")
        if weight.dim() != 2 or weight.shape[1] % MULTIPLE or not weight.numel():
            wanted = f"[rows, H], H a multiple of {MULTIPLE}"
            raise Refused("FP8 head: weight shape", tuple(weight.shape), wanted)
        if weight.dtype not in _DTYPES:
            wanted = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
            raise Refused("FP8 head: weight dtype", weight.dtype, f"one of {wanted}")
        obstacle = fp8_obstacle(weight.device)
        if obstacle:
            raise Refused("FP8 head: device", str(weight.device), "another", obstacle)
        self.num_rows, self.hidden_size = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        rows = -(-self.num_rows // MULTIPLE) * MULTIPLE
        self.codes = torch.zeros((rows, self.hidden_size), dtype=CODE, device=weight.device)
        self.scales = torch.ones((1, rows), dtype=torch.float32, device=weight.device)
        with torch.no_grad():
            for start in range(0, self.num_rows, _ROWS_AT_A_TIME):
                stop = min(start + _ROWS_AT_A_TIME, self.num_rows)
                codes, scales = quantise_rows_plain(weight[start:stop])
                self.codes[start:stop] = codes
                self.scales[0, start:stop] = scales[:, 0]

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + 4 * self.scales.numel()

    def __call__(self, x: Tensor) -> Tensor:
        """Logits ``[..., num_padded]`` of ``x [..., H]``, contiguous, in the head's dtype."""
        rows = x.reshape(-1, self.hidden_size).contiguous()
        logits = self._scaled_mm(rows) if rows.is_cuda and len(rows) else self.plain(rows)
        return logits.to(self.dtype).view(*x.shape[:-1], self.num_rows)

    def _scaled_mm(self, x: Tensor) -> Tensor:
        """``[N, num_padded]`` BF16 by the GPU's FP8 product."""
        codes, scales = quantise_rows(x)
        # Fast accumulation: 14 bits or so of each partial sum, where the codes have four.
        logits = torch._scaled_mm(
            codes,
            self.codes.t(),
            scale_a=scales,
            scale_b=self.scales,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return logits[:, : self.num_rows].contiguous()  # no copy where no row is padding

    def plain(self, x: Tensor) -> Tensor:
        """``[N, num_padded]`` BF16: the same in FP32, part of the vocabulary after part."""
        codes, scales = quantise_rows_plain(x)
        logits = torch.empty((len(x), self.num_rows), dtype=torch.bfloat16, device=x.device)
        values = codes.float()
        for start in range(0, self.num_rows, _ROWS_AT_A_TIME):
            part = slice(start, min(start + _ROWS_AT_A_TIME, self.num_rows))
            sums = values @ self.codes[part].float().t()
            logits[:, part] = sums * scales * self.scales[:, part]
        return logits
