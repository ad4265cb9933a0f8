"""FP32 master weights of a drafter, and the optimizer that moves them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from knockon.train.ranks import TrainRanks
from knockon.train.settings import TrainSettings


class MasterWeights:
    """The optimizer works on FP32 masters; the module computes with copies in its own dtypes.

    With ``muon``, matrices of the layers are moved by Muon (momentum, orthogonalised by five
    Newton-Schulz steps: Jordan et al. 2024, kellerjordan.github.io/posts/muon; scaled so that
    AdamW's rates fit, arXiv 2502.16982), everything else by AdamW at the same rate.

    Args:
        module: its parameters that want gradients are trained.
        ranks: gradients are summed over them.
    """

    def __init__(self, module: nn.Module, settings: TrainSettings, ranks: TrainRanks) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.parameters = [parameter for _, parameter in named]
        self.tensors = [p.detach().float().clone().requires_grad_(True) for p in self.parameters]
        self.clip, self.ranks = settings.clip, ranks
        of_layers = [name.startswith(("backbone.", "head.")) for name, _ in named]
        by_muon, decayed, kept = [], [], []
        for master, of_layer in zip(self.tensors, of_layers, strict=True):
            if master.dim() == 1:
                kept.append(master)
            elif of_layer and settings.optimizer == "muon":
                by_muon.append(master)
            else:
                decayed.append(master)
        decay = settings.weight_decay
        groups = [
            {"params": decayed, "weight_decay": decay},
            {"params": kept, "weight_decay": 0.0},
        ]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=settings.peak_rate,
                betas=(0.9, 0.95),
                fused=ranks.device.type == "cuda",
            )
        ]
        if by_muon:
            self.optimizers.append(
                torch.optim.Muon(
                    by_muon,
                    lr=settings.peak_rate,
                    weight_decay=decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )

    def update(self, rate: float) -> None:
        """One step from the gradients of the module, which are dropped."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for master, grad in zip(self.tensors, self.ranks.add(grads), strict=True):
            master.grad = grad
        for parameter in self.parameters:
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.tensors, self.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self._copy()

    def _copy(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list[Tensor](self.parameters), self.tensors)

    def state(self) -> dict[str, Any]:
        """All that :meth:`load` needs."""
        return {
            "masters": [master.detach() for master in self.tensors],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Back to what :meth:`state` gave."""
        with torch.no_grad():
            torch._foreach_copy_(self.tensors, state["masters"])
        self._copy()
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
