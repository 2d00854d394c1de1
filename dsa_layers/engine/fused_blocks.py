"""The decoder blocks, hyper-connections and language-model head for inference."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import torch

import dsa
from dsa_layers.batch.selected import Selected
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.engine.fp32_product import fp32_product
from dsa_layers.engine.joint_linear import Cast, norm_and_cast, norm_cast_scaling
from dsa_layers.layers.compressed_attention import Angles
from dsa_layers.layers.hyper_connections import HyperConnection, HyperHead, IndependentHyperConnection, StreamMixing
from dsa_layers.layers.linear import LanguageModelHead
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.models.deepseek_v4 import HyperDecoderBlock
from dsa_layers.models.deepseek_v32 import DecoderBlock
from dsa_layers.models.hy_v4 import HYV4DecoderBlock
from dsa_layers.parallel.placement import placement_of
from dsa_layers.parallel.ranks import ALONE, Ranks


class FusedDecoderBlock(DecoderBlock):
    """`DecoderBlock` with a `PagedAttention` and a `FusedSwiGLU` or `FusedMoE`.

    ranks     the ranks that compute the model
    is_first  whether the block's input has all rows even in a sharded pass (`placement_of`), in which the input of
              other blocks has only this rank's rows
    is_last   the same for the block's output
    """

    ranks: Ranks = ALONE
    is_first = is_last = False

    @torch.no_grad()
    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | None = None,
        selected: Selected | None = None,
    ) -> tuple[torch.Tensor, Selected]:
        placement = placement_of(batch, self.ranks)
        x = placement.local(x) if self.is_first else x
        _, normed, cast = norm_and_cast(self.input_layernorm, x, self.self_attn.joint_layers())
        y, selected = self.self_attn(normed, cos, sin, batch, cache, selected, cast=cast)
        readers = self.mlp.joint_layers()
        x, normed, cast = norm_and_cast(self.post_attention_layernorm, y, readers, residual=x)
        x = self.mlp(normed, cast=cast, residual=x, placement=placement)
        return (placement.all_gather(x)[0] if self.is_last else x), selected


# (post, comb), or (post,) for independent streams: the results of `collapse` without the first one
Weights = tuple[torch.Tensor, ...]


class MixedStreams(NamedTuple):
    """Residual streams and their projection.

    streams  X [T, n, D]: n streams of D channels
    mix      fp32 [T, (2 + n) n]: the projection of X that the next hyper-connection needs; None if not computed yet
    """

    streams: torch.Tensor
    mix: torch.Tensor | None


class _FusedMixing(StreamMixing):
    """`StreamMixing` that projects bf16 streams on a GPU with `dsa.hyper_mix`, if the weight fn is fp32.

    fn_parts  bf16 [3, *fn.shape]: the result of `split_in_bf16` for fn, which `dsa.hyper_mix` reads. `prepare` computes
              it. The methods that load or move fn call `prepare`; after any other change of fn, call it again
    """

    fn_parts: torch.Tensor | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare(self) -> None:
        """Compute `fn_parts`. Reuse the memory of existing parts, because captured CUDA graphs read this memory."""
        parts, held = split_in_bf16(self.fn), self.fn_parts
        same_memory = held is not None and held.shape == parts.shape and held.device == parts.device
        self.fn_parts = held.copy_(parts) if same_memory else parts

    def project(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.parts_for(x)
        return super().project(x) if parts is None else dsa.hyper_mix(x, parts)

    def parts_for(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the parts of fn if `dsa.hyper_mix` can project streams of x's dtype and device, else None."""
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
    """Split an fp32 weight into three bf16 parts. Return [3, *weight.shape].

    The parts' sum is exactly the weight for magnitudes from 2^-110 to 3.396e38. Smaller weights may lose low bits.
    Larger weights become infinite in bf16, so the sum of their parts is NaN.
    """
    parts, rest = [], weight.detach().float()
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.stack(parts)


class FusedConnection(_FusedMixing):
    """A hyper-connection for inference. A block applies a sublayer to `mixed`, a `MixedStreams`, as follows:

        x, cast, weights = enter(mixed, norm, readers)
        mixed = leave(sublayer(x, cast), mixed, weights, following)

    `readers` are the sublayer's layers that multiply x. `following` is the next hyper-connection, or None. For at least
    256 channels the results have the same bits as those of `collapse`, `norm` and `expand`, which `enter` and `leave`
    fuse if they can.
    """

    with_norm_and_cast: str  # the name of the op that computes `collapse`, norm and FP8 cast
    cast_options: ClassVar[dict[str, bool]] = {}  # further options of this op

    def enter(
        self, mixed: MixedStreams, norm: RMSNorm, readers: tuple[torch.nn.Module, ...]
    ) -> tuple[torch.Tensor, Cast | None, Weights]:
        """Return (x, cast, weights).

        x        norm(the first result of collapse), [T, D]
        cast     x in FP8 with scales, for the layers `readers`; None as in `norm_and_cast`
        weights  the other results of collapse
        """
        x, mix = mixed
        use_ue8m0 = norm_cast_scaling(norm, x.shape[-1], readers)
        if use_ue8m0 is None or x.dtype != torch.bfloat16:
            x, *weights = self.collapse(x, mix)
            _, x, cast = norm_and_cast(norm, x, readers)
            return x, cast, tuple(weights)
        mix = self.project(x) if mix is None else mix
        parameters = self.base.float(), self.scale.float(), norm.weight.float()
        options = {**self.options(), **self.cast_options, "norm_eps": norm.eps, "use_ue8m0": use_ue8m0}
        x, q, q_scale, *weights = getattr(dsa, self.with_norm_and_cast)(x, mix, *parameters, **options)
        return x, (q, q_scale), tuple(weights)

    def leave(
        self, y: torch.Tensor, mixed: MixedStreams, weights: Weights, following: "FusedConnection | None"
    ) -> MixedStreams:
        """Return the new streams, with the projection of `following` if one op computes both.

        y        [T, D]: the output of the sublayer
        weights  those that `enter` returned
        """
        parts = None if following is None else following.parts_for(mixed.streams)
        if parts is None:
            return MixedStreams(self.expand(y, mixed.streams, *weights), None)
        post, comb = (*weights, None)[:2]
        return MixedStreams(*dsa.hyper_expand_mix(y, mixed.streams, post, comb, parts))


class FusedHyperConnection(FusedConnection, HyperConnection):
    """`HyperConnection` for inference."""

    with_norm_and_cast = "hyper_collapse_norm_cast_to_fp8"


class FusedIndependentHyperConnection(FusedConnection, IndependentHyperConnection):
    """`IndependentHyperConnection` for inference."""

    with_norm_and_cast = "hyper_collapse_independent_norm_cast_to_fp8"
    cast_options: ClassVar[dict[str, bool]] = {"pad_scales": True}


class FusedHyperHead(_FusedMixing, HyperHead):
    """`HyperHead` for inference."""


class FusedHyperBlock(HyperDecoderBlock):
    """`HyperDecoderBlock` with a `PagedCompressedAttention` and a `FusedMoE`.

    following  a tuple with the first hyper-connection of the next block, or (). A tuple prevents registration as a
               submodule. If `following` is not (), the block returns `MixedStreams`, else the streams
    ranks, is_first, is_last  see `FusedDecoderBlock`
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


class FusedHYV4Block(HYV4DecoderBlock, FusedDecoderBlock):
    """`HYV4DecoderBlock` with fused parts. following: see `FusedHyperBlock`."""

    following: tuple[FusedConnection, ...] = ()

    @torch.no_grad()
    def forward(
        self,
        x: torch.Tensor | MixedStreams,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: Any = None,
        selected: Selected | None = None,
    ) -> tuple[torch.Tensor | MixedStreams, Selected | None]:
        placement = placement_of(batch, self.ranks)
        if not isinstance(x, MixedStreams):
            x = MixedStreams(placement.local(x) if self.is_first else x, None)
        y, cast, weights = self.attn_hc.enter(x, self.input_layernorm, self.self_attn.joint_layers())
        y, selected = self.self_attn(y, cos, sin, batch, cache, selected, cast=cast)
        x = self.attn_hc.leave(y, x, weights, self.ffn_hc)
        y, cast, weights = self.ffn_hc.enter(x, self.post_attention_layernorm, self.mlp.joint_layers())
        x = self.ffn_hc.leave(self.mlp(y, cast=cast, placement=placement), x, weights, *(self.following or (None,)))
        if self.following:
            return x, selected
        return (placement.all_gather(x.streams)[0] if self.is_last else x.streams), selected


class FusedHead(LanguageModelHead):
    """`LanguageModelHead` without gradients. A rank computes its columns of the logits, and returns all columns."""

    ranks: Ranks = ALONE

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.join_columns(fp32_product(x, self.weight))
