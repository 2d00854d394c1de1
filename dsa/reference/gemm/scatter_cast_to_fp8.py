"""FP8 cast of tokens. A token is cast once and stored to several rows, one per expert."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8


@torch.no_grad()
@without_autocast
def scatter_cast_to_fp8(
    x: torch.Tensor, places: torch.Tensor, use_ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_token_cast_to_fp8(x, use_ue8m0)`, token t stored in the rows places[t, 0] to places[t, k - 1] of T * k rows.

    Rows that no token is stored to, which the kernel leaves undefined, are zero here, with scales of 1. Places outside
    [0, T * k) are ignored. Arguments as in `dsa.scatter_cast_to_fp8`.
    """
    q, scale = per_token_cast_to_fp8(x, use_ue8m0)
    count = places.numel()
    inside = (places >= 0) & (places < count)
    tokens = torch.arange(len(places), device=places.device)[:, None].expand_as(places)
    sources, targets = tokens[inside], places[inside].long()
    values = torch.zeros(count, q.shape[1], dtype=torch.uint8, device=q.device)
    values[targets] = q.view(torch.uint8)[sources]
    scales = torch.ones(count, scale.shape[1], dtype=scale.dtype, device=scale.device)
    scales[targets] = scale[sources]
    return values.view(q.dtype), scales
