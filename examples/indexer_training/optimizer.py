"""What a step does to the parameters."""

import math

import torch
from torch import nn

_DECAY = 0.1  # of matrices, but for the embedding
# Not Muon's, although they are matrices: their rows are tokens and experts, each with a meaning of its own.
_ROWS = ("embed_tokens.", "lm_head.", "mlp.gate.")


class Optimizer:
    """Muon for matrices and AdamW for what else there is, with one cosine schedule, on fp32 copies of the parameters,
    which may have fewer bits.

    Muon's steps have AdamW's size (`match_rms_adamw`), so that one learning rate serves both. A stack of experts'
    matrices is as many matrices. Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks"
    (2024); for the size, J. Liu et al., "Muon is scalable for LLM training" (arXiv 2502.16982).
    """

    def __init__(self, parameters: dict[str, nn.Parameter], rate: float) -> None:
        self._rate, self._parameters = rate, list(parameters.values())
        self._pieces = [piece for p in self._parameters for piece in _pieces(p.detach())]
        self._copies = [piece.float().clone() for piece in self._pieces]
        for copy in self._copies:
            copy.grad = torch.empty_like(copy)
        muon, decayed, others = [], [], []
        names = (name for name, p in parameters.items() for _ in _pieces(p))
        for name, copy in zip(names, self._copies):
            if copy.dim() == 2 and not any(part in name for part in _ROWS):
                muon.append(copy)
            else:
                (decayed if copy.dim() == 2 and "embed_tokens." not in name else others).append(copy)
        groups = [{"params": decayed, "weight_decay": _DECAY}, {"params": others, "weight_decay": 0.0}]
        self._by_adamw = decayed + others
        options = {"betas": (0.9, 0.95), "fused": self._copies[0].is_cuda}
        self._optimizers = (
            torch.optim.Muon(muon, rate, weight_decay=_DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups, rate, **options),
        )

    @torch.no_grad()
    def step(self, step: int, steps: int) -> None:
        """The step of this number, from 0, of so many."""
        gradients = [piece for p in self._parameters for piece in _pieces(p.grad)]
        torch._foreach_copy_([copy.grad for copy in self._copies], gradients)
        nn.utils.clip_grad_norm_(self._by_adamw, 1.0)  # a step of Muon's is as long whatever its gradient's norm is
        rise = max(1, min(200, steps // 10))
        share = min((step + 1) / rise, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate * share
            optimizer.step()
        torch._foreach_copy_(self._pieces, self._copies)


def _pieces(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The matrices of a stack of them, and everything else as it is."""
    return x.unbind() if x.dim() == 3 else (x,)
