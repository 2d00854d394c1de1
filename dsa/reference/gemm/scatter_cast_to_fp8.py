"""The FP8 cast of tokens to the rows of the experts that they go to."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8
from dsa.runtime.arguments import ROWS, Arguments, Flag, Tensor
from dsa.runtime.checks import FLOATS, INT32, check_memory

BLOCK = 128


def _check_channels(name: str, x: torch.Tensor) -> None:
    if x.shape[1] % BLOCK:
        raise ValueError(f"{name}: K must be a multiple of {BLOCK}, got shape {list(x.shape)}")


SCATTER_CAST_TO_FP8 = Arguments(
    x=Tensor("T K", FLOATS, layout=ROWS, rule=_check_channels),
    places=Tensor("T k", INT32),
    use_ue8m0=Flag(),
)


@torch.no_grad()
@without_autocast
def scatter_cast_to_fp8(
    x: torch.Tensor, places: torch.Tensor, use_ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_token_cast_to_fp8(x, use_ue8m0)`, token t at the rows places[t, 0] to places[t, k - 1] of T * k rows.

    Rows that no token goes to are zero, with scales of 1; places outside are none. Arguments as of
    `dsa.scatter_cast_to_fp8`.
    """
    SCATTER_CAST_TO_FP8.check(x, places, use_ue8m0)
    check_memory("x", x)
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
