"""Hyper-connections and their decoder block for inference."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch

import dsa
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache
from dsa_layers.engine.joint_linear import Cast, norm_and_cast, norm_cast_scaling
from dsa_layers.layers.compressed_attention import Angles
from dsa_layers.layers.hyper_connections import HyperConnection, HyperHead, StreamMixing
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.models.deepseek_v4 import HyperDecoderBlock
from dsa_layers.parallel.placement import placement_of
from dsa_layers.parallel.ranks import ALONE, Ranks

Weights = tuple[torch.Tensor, torch.Tensor]  # post and comb


class MixedStreams(NamedTuple):
    """Streams X [T, n, D], and their projection mix fp32 [T, (2 + n) n] by the hyper-connection that collapses them.
    mix is None if it has yet to be computed."""

    streams: torch.Tensor
    mix: torch.Tensor | None


class _FusedMixing(StreamMixing):
    """On a GPU the projection of bf16 streams is `dsa.hyper_mix`, whose tensor cores read fn as three bf16 parts.

    fn_parts  bf16 [3, ...]: the parts, whose products with bf16 numbers are exact in fp32. They are made by `prepare`,
              and again if fn is loaded or moved. After another change of fn, call `fuse` again
    """

    fn_parts: torch.Tensor | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare(self) -> None:
        """Make the parts, in the same memory if there are some: captured CUDA graphs read them."""
        parts, held = split_in_bf16(self.fn), self.fn_parts
        same_memory = held is not None and held.shape == parts.shape and held.device == parts.device
        self.fn_parts = held.copy_(parts) if same_memory else parts

    def project(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.parts_for(x)
        return super().project(x) if parts is None else dsa.hyper_mix(x, parts)

    def parts_for(self, x: torch.Tensor) -> torch.Tensor | None:
        """The parts of fn if the projection of streams like x is `dsa.hyper_mix`, else None."""
        exact = x.dtype == torch.bfloat16 and self.fn.dtype == torch.float32
        return self.fn_parts if exact and x.is_cuda else None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        applied = super()._apply(fn, recurse)
        self.prepare()
        return applied

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.prepare()


def split_in_bf16(weight: torch.Tensor) -> torch.Tensor:
    """fp32 -> bf16 [3, ...], whose sum is the weight to 2^-24 of each number. Numbers above 3.39e38 are not finite in
    bf16."""
    parts, rest = [], weight.detach().float()
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.stack(parts)


class FusedHyperConnection(_FusedMixing, HyperConnection):
    """`HyperConnection` for inference. A sublayer of the streams X is

        x, cast, weights = enter(X, norm, readers)
        X = leave(sublayer(x, cast), X, weights, following)

    with the bits of `collapse`, norm and `expand`. The collapse, the norm and its cast are one kernel where they can
    be, and so are the expansion and the projection with which `following` begins, the next hyper-connection.
    """

    def enter(
        self, mixed: MixedStreams, norm: RMSNorm, readers: tuple[torch.nn.Module, ...]
    ) -> tuple[torch.Tensor, Cast | None, Weights]:
        """-> (x = norm(collapse(X)) [T, D], the cast of it that `readers` share, post and comb)."""
        x, mix = mixed
        use_ue8m0 = norm_cast_scaling(norm, x.shape[-1], readers)
        if use_ue8m0 is None or x.dtype != torch.bfloat16:
            x, *weights = self.collapse(x, mix)
            _, x, cast = norm_and_cast(norm, x, readers)
            return x, cast, tuple(weights)
        mix = self.project(x) if mix is None else mix
        parameters = self.base.float(), self.scale.float(), norm.weight.float()
        options = {**self.options(), "norm_eps": norm.eps, "use_ue8m0": use_ue8m0}
        x, *rest = dsa.hyper_collapse_norm_cast_to_fp8(x, mix, *parameters, **options)
        return x, tuple(rest[:2]), tuple(rest[2:])

    def leave(
        self, y: torch.Tensor, mixed: MixedStreams, weights: Weights, following: "FusedHyperConnection | None"
    ) -> MixedStreams:
        """The new streams. y [T, D]: the sublayer's output."""
        parts = None if following is None else following.parts_for(mixed.streams)
        if parts is None:
            return MixedStreams(self.expand(y, mixed.streams, *weights), None)
        return MixedStreams(*dsa.hyper_expand_mix(y, mixed.streams, *weights, parts))


class FusedHyperHead(_FusedMixing, HyperHead):
    """`HyperHead` for inference."""


class FusedHyperBlock(HyperDecoderBlock):
    """`HyperDecoderBlock` of a `PagedCompressedAttention` and a `FusedMoE`.

    following: the next block's first hyper-connection, in a tuple since it is no submodule. The block then returns
    `MixedStreams`, which the next block takes.
    ranks, is_first, is_last: as of `FusedDecoderBlock`.
    """

    following: tuple[FusedHyperConnection, ...] = ()
    ranks: Ranks = ALONE
    is_first = is_last = False

    @torch.no_grad()
    def forward(
        self,
        streams: torch.Tensor | MixedStreams,
        tokens: torch.Tensor,
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache | None = None,
    ) -> torch.Tensor | MixedStreams:
        placement = placement_of(batch, self.ranks)
        if not isinstance(streams, MixedStreams):
            streams = MixedStreams(placement.local(streams) if self.is_first else streams, None)
        x, cast, weights = self.hc_attn.enter(streams, self.attn_norm, self.attn.joint_layers())
        y = self.attn(x, rope, entry_rope, batch, cache, cast=cast)
        streams = self.hc_attn.leave(y, streams, weights, self.hc_ffn)
        x, cast, weights = self.hc_ffn.enter(streams, self.ffn_norm, self.ffn.joint_layers())
        y = self.ffn(x, tokens, cast=cast, placement=placement)
        streams = self.hc_ffn.leave(y, streams, weights, *(self.following or (None,)))
        if self.following:
            return streams
        return placement.all_gather(streams.streams)[0] if self.is_last else streams.streams
