"""Exact selection of the keys with the largest scores, in bounded memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import dsa
from dsa.kernels.indexer.limits import MAX_SELECTED
from dsa.ops.indexer.fp8_mqa_logits import ACCUMULATORS
from dsa.runtime.checks import check_dtype, integer
from dsa_layers.batch.selectable_keys import SelectableKeys
from dsa_layers.layers.linear import Linear, linear_fp32
from dsa_layers.layers.rope import Angles

FP8_DIM = 128  # the only head_dim that `dsa.quantize_indexer_queries` accepts; `quantize` needs this op
# The default accumulator dtype of FP8 prefill scores on Hopper. Decoding with a cache, scores in other dtypes, and
# other devices accumulate in fp32. Measured (docs/how-to/change-the-indexer.md):
#   torch.float16  1.4 to 1.7 times as fast as DeepGEMM, which accumulates in fp32. The error of a score is about 5e-4
#                  of the scores' root mean square. Fewer than one in 1000 selected keys differ from torch.float32's
#   torch.float32  1.08 to 1.10 times as fast as DeepGEMM
SCORE_ACCUMULATORS = torch.float16
WORKSPACE = 260 << 20  # default bytes for scores: enough for the fp32 scores of 64 tokens and a million keys
# With fp16 accumulation, `dsa.indexer_select` is faster than separate ops for scores and top-k if there are at least
# FUSED_KEYS keys and FUSED_TOKENS tokens (docs/explanation/kernels.md, "Fused selection"). FUSED_BYTES: upper bound of
# the workspace that `dsa.indexer_select` needs per token, in bytes.
FUSED_KEYS, FUSED_TOKENS, FUSED_BYTES = 65536, 1024, 33 << 10
ROW_PADDING = 512  # upper bound of the columns of padding that `dsa.fp8_mqa_logits` adds to a row
Keys = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # float keys, or e4m3 keys and their scales
Ranges = tuple[torch.Tensor, torch.Tensor, int]  # see `KeySelection.select_packed`


class KeySelection(nn.Module):
    """The base class of indexers that select the `top_k` keys with the largest scores. Among keys with equal scores,
    the lowest positions are selected.

    workspace     maximum bytes of scores in memory at a time in prefill; the scores of one token may exceed it
    accumulators  accumulator dtype of FP8 scores in prefill, as in `dsa.fp8_mqa_logits`

    Every subclass sets these attributes:

    n_heads, head_dim  heads of an index query, and channels per head
    quantize           whether queries and keys are cast to e4m3
    rope               the arguments `interleaved` and `dims` of `dsa.apply_rotary`
    weights_proj       the projection that `head_weights` applies to x
    """

    n_heads: int
    head_dim: int
    quantize: bool
    rope: dict[str, Any]
    weights_proj: Linear

    def __init__(self, top_k: int, workspace: int = WORKSPACE, accumulators: torch.dtype = SCORE_ACCUMULATORS) -> None:
        super().__init__()
        self.top_k, self.workspace = integer("top_k", top_k, at_least=1), integer("workspace", workspace, at_least=1)
        check_dtype("accumulators", accumulators, ACCUMULATORS)
        self.accumulators = accumulators

    @property
    def selects(self) -> int:
        """The number of keys to select: `top_k`, unless a key stands for several tokens."""
        return self.top_k

    @property
    def weight_scale(self) -> float:
        return self.n_heads**-0.5 * self.head_dim**-0.5

    def head_weights(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head weights w = weights_proj(x) * weight_scale, fp32 [T, n_heads]."""
        return linear_fp32(x, self.weights_proj.weight, self.weight_scale)

    def rotated_queries(
        self, q: torch.Tensor, weights: torch.Tensor, rope: Angles
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (q with rope [T, n_heads, head_dim], w). If `quantize`, q is e4m3, and the scales of q are multiplied
        into w. q: wq_b(qr) [T, n_heads * head_dim]; weights: the head weights w."""
        q = q.unflatten(-1, (self.n_heads, self.head_dim))
        if not self.quantize:
            return dsa.apply_rotary(q, *rope, **self.rope), weights
        if self.head_dim != FP8_DIM:
            raise ValueError(f"head_dim: must be {FP8_DIM} for selection with quantize=True, got {self.head_dim}")
        return dsa.quantize_indexer_queries(q, weights, *rope, **self.rope)

    def select_new(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        rope: Angles,
        view: SelectableKeys,
        by_sequence: bool,
    ) -> torch.Tensor:
        """Return int32 [T, selects], the selected positions in each token's sequence, in a pass without a cache.

        q, rope      wq_b(qr), and (cos, sin) at the positions of the new tokens
        keys         all keys of the pass, float [N, head_dim]
        weights      the head weights w
        view         which keys each token sees
        by_sequence  whether float scores are computed per sequence; all sequences then have equally many new tokens
        """
        q, weights = self.rotated_queries(q, weights, rope)
        if self.quantize:
            keys = quantized_keys(keys)
        return self.select_packed(q, keys, weights, view.visible_ranges, view.key_lens if by_sequence else None)

    def select_packed(
        self,
        q: torch.Tensor,
        keys: Keys,
        weights: torch.Tensor,
        ranges: Ranges,
        key_lens: Sequence[int] | None = None,
        paging: dict | None = None,
    ) -> torch.Tensor:
        """Select among packed keys, one chunk of tokens at a time. Each chunk's scores fit into the workspace, unless
        the chunk is a single token.

        q         [T, heads, dim], float or e4m3
        keys      float [N, dim]; if q is e4m3, e4m3 [N, dim] and fp32 scales [N]
        weights   fp32 [T, heads]
        ranges    (starts, lengths, most): the first row that each token sees and the number of rows that it sees, both
                  int32 [T], and an upper bound of lengths
        key_lens  in a decoding pass, the number of keys of each sequence; float keys are then scored per sequence
        paging    None, or the arguments block_table, page_size and row_to_seq of `dsa.topk_indices`

        Returns int32 [T, selects]: the selected positions, counted from `starts`, ascending, padded with -1. With
        `paging`, cache slots replace the positions.
        """
        starts, lengths, most = ranges
        quantised, paging = isinstance(keys, tuple), paging or {}
        if most == 0 or len(q) == 0:
            return torch.full((len(q), self.selects), -1, dtype=torch.int32, device=q.device)
        if not quantised and key_lens is not None and len(key_lens) > 1:
            return self._select_by_sequence(q, keys, weights, lengths, key_lens, paging)
        if not quantised:
            q, keys = q.float(), keys.float()
        columns = most + ROW_PADDING if quantised else len(keys)
        fused = quantised and self._selects_fused(len(q), most)
        tokens = max(1, self.workspace // (FUSED_BYTES if fused else 4 * columns))
        tokens = -(-len(q) // -(-len(q) // tokens))  # the smallest chunk size with this number of chunks
        found = []
        for first in range(0, len(q), tokens):
            part = slice(first, first + tokens)
            begins, counts, own_paging = starts[part], lengths[part], _part_of(paging, part)
            inputs = q[part], keys, weights[part], begins, begins + counts
            if fused:
                found.append(dsa.indexer_select(*inputs, self.selects, accumulators=self.accumulators, **own_paging))
            elif quantised:
                options = {"clean_logits": False, "max_seqlen_k": most, "accumulators": self.accumulators}
                # No variable holds the scores, so their memory is freed before the next chunk's scores are computed.
                found.append(
                    dsa.topk_indices(dsa.fp8_mqa_logits(*inputs, **options), self.selects, lengths=counts, **own_paging)
                )
            else:
                found.append(
                    dsa.topk_indices(dsa.mqa_logits(*inputs), self.selects, starts=begins, lengths=counts, **own_paging)
                )
        return found[0] if len(found) == 1 else torch.cat(found)

    def _selects_fused(self, tokens: int, most: int) -> bool:
        """Return whether to call `dsa.indexer_select` (see FUSED_KEYS). most: an upper bound of the keys that a token
        sees."""
        if self.accumulators != torch.float16 or self.selects > MAX_SELECTED:
            return False
        return most >= FUSED_KEYS and min(tokens, self.workspace // FUSED_BYTES) >= FUSED_TOKENS

    def _select_by_sequence(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        lengths: torch.Tensor,
        key_lens: Sequence[int],
        paging: dict,
    ) -> torch.Tensor:
        """Select in a decoding pass with float keys, one sequence after another."""
        tokens, found = len(q) // len(key_lens), []
        for i, own_keys in enumerate(keys.split(key_lens)):
            part = slice(i * tokens, (i + 1) * tokens)
            ranges = torch.zeros_like(lengths[part]), lengths[part], len(own_keys)
            own_paging = _part_of(paging, part)
            found.append(self.select_packed(q[part], own_keys, weights[part], ranges, paging=own_paging))
        return torch.cat(found)


def _part_of(paging: dict, part: slice) -> dict:
    return paging | {"row_to_seq": paging["row_to_seq"][part]} if paging else paging


def quantized_keys(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hadamard-transform and quantise k [N, D]. Return e4m3 [N, D] and one scale per key, fp32 [N]."""
    k, scale = dsa.per_token_cast_to_fp8(k, True, k.shape[-1], hadamard=True)
    return k, scale.squeeze(-1)
