"""A sublayer between residual streams: what it reads of them, and its output back into them.

    x, cast, weights = enter(hc, streams, norm, sublayer)
    y = sublayer(x, **given(cast))
    streams = leave(hc, y, streams, weights, following)

is streams X [T, n, D] -> x = norm(collapse(X)) [T, D] -> X' = expand(y, X), with the bits of these functions by
themselves. Where they can, the collapse, the norm and its cast are one kernel, and so are the expansion and the
projection that `following`, the hyper-connection that collapses X', begins with.
"""

from typing import NamedTuple

import torch
from torch import nn

import dsa
from dsa_layers.layers.hyper_connections import HyperConnection
from dsa_layers.layers.joint_linear import Cast
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.norm_and_cast import cast_readers, norm_and_cast, scaling


class MixedStreams(NamedTuple):
    """Streams X [T, n, D], and their projection mix fp32 [T, (2 + n) n] by the hyper-connection that collapses them."""

    streams: torch.Tensor
    mix: torch.Tensor | None


Weights = tuple[torch.Tensor, torch.Tensor]  # post and comb


def enter(
    hc: HyperConnection, streams: torch.Tensor | MixedStreams, norm: RMSNorm, sublayer: nn.Module
) -> tuple[torch.Tensor, Cast | None, Weights]:
    """-> (x that the sublayer reads, the cast of it that the sublayer takes if there is one, what `leave` needs)."""
    x, mix = _parted(streams)
    layers = cast_readers(sublayer)
    use_ue8m0 = scaling(norm, x.shape[-1], layers)
    if use_ue8m0 is None or x.dtype != torch.bfloat16 or not _is_plain(hc):
        x, *weights = hc.collapse(x) if mix is None else hc.collapse(x, mix)
        _, x, cast = norm_and_cast(norm, x, layers)
        return x, cast, tuple(weights)
    mix = hc.project(x) if mix is None else mix
    parameters = hc.base.float(), hc.scale.float(), norm.weight.float()
    options = {**hc.options(), "norm_eps": norm.eps, "use_ue8m0": use_ue8m0}
    x, *rest = dsa.hyper_collapse_norm_cast_to_fp8(x, mix, *parameters, **options)
    return x, tuple(rest[:2]), tuple(rest[2:])


def leave(
    hc: HyperConnection,
    y: torch.Tensor,
    streams: torch.Tensor | MixedStreams,
    weights: Weights,
    following: HyperConnection | None = None,
) -> torch.Tensor | MixedStreams:
    """-> the new streams, with their projection by `following` where one kernel gives both. y [T, D]: of the sublayer;
    streams, weights: that `enter` got, and gave."""
    x, _ = _parted(streams)
    parts = following.parts_for(x) if _is_plain(hc) and _is_plain(following) else None
    if parts is None:
        return hc.expand(y, x, *weights)
    return MixedStreams(*dsa.hyper_expand_mix(y, x, *weights, parts))


def _parted(streams: torch.Tensor | MixedStreams) -> MixedStreams:
    return streams if isinstance(streams, MixedStreams) else MixedStreams(streams, None)


def _is_plain(hc: HyperConnection | None) -> bool:
    """Whether the formulas are all that its functions do: nobody has put others in their place."""
    return type(hc) is HyperConnection and not {"project", "collapse", "expand"} & vars(hc).keys()
