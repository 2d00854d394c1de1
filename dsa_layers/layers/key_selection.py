"""Index scores, and the keys that each token selects by them: for keys packed in a row, and for keys in FP8 pages.

The keys are tokens, or in DeepSeek-V4 compressed entries. I[t, s] = sum_h weights[t, h] relu(q[t, h] . k[s]).
"""

from collections.abc import Sequence
from typing import Protocol

import torch

import dsa
from dsa.kernels.indexer.limits import MAX_SELECTED
from dsa.reference.autocast import without_autocast
from dsa.reference.indexer.index_scores import index_scores
from dsa_layers.layers.score_accumulators import SCORE_ACCUMULATORS

WORKSPACE = 260 << 20  # bytes of scores at a time: of 64 tokens and a million keys
# Keys and tokens from which on half scores are selected as they are computed, which is faster there (docs/explanation/
# kernels.md, "Fused selection"), and bytes that it takes of a token.
FUSED_KEYS, FUSED_TOKENS, FUSED_BYTES = 65536, 1024, 33 << 10
ROW_PADDING = 512  # numbers, at most, behind a row of scores
Keys = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class DecodingView(Protocol):
    """What the layers of a decoding pass share, of which each pass makes what it reads.

    index_schedule   the plan of `dsa.fp8_paged_mqa_logits` for the lengths of the keys
    sequences        int32 [T]: the sequence of each new token
    """

    index_schedule: torch.Tensor
    sequences: torch.Tensor


def select_packed(
    q: torch.Tensor,
    keys: Keys,
    weights: torch.Tensor,
    top_k: int,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    *,
    accumulators: torch.dtype = SCORE_ACCUMULATORS,
    workspace: int = WORKSPACE,
    key_lens: Sequence[int] | None = None,
    row_to_seq: torch.Tensor | None = None,
    **paging: torch.Tensor | int,
) -> torch.Tensor:
    """Selects among keys that are packed in rows, for some tokens at a time.

    q           [T, heads, dim], float or e4m3; weights fp32 [T, heads]: of the tokens
    keys        float [N, dim]; where q is e4m3, e4m3 [N, dim] and fp32 scales [N]
    starts      int32 [T]: the first row that each token sees; lengths int32 [T]: how many it sees
    most        an upper bound of lengths, so that of e4m3 no token's scores have columns for other sequences' keys
    workspace   bytes that scores, or what there is in their place, take at most, or one token's
    accumulators  of scores of e4m3: torch.float32, or torch.float16, as `dsa.fp8_mqa_logits` takes them
    key_lens    in a decoding pass, whose sequences have equally many tokens: the rows of each sequence's keys, numbers
                of the host; else None. Of float keys each token is scored with its own sequence's alone then
    row_to_seq  [T], with block_table and page_size in `paging`, as `dsa.topk_indices` takes them: gives slots, not
                positions

    Returns int32 [T, top_k]: the selected positions, counted from `starts`, ascending, then -1.
    """
    quantised = isinstance(keys, tuple)
    if most == 0 or len(q) == 0:
        return torch.full((len(q), top_k), -1, dtype=torch.int32, device=q.device)
    if not quantised and key_lens is not None and len(key_lens) > 1:
        return _select_by_sequence(q, keys, weights, top_k, lengths, key_lens, workspace, row_to_seq, **paging)
    if not quantised:
        q, keys = q.float(), keys.float()
    columns = most + ROW_PADDING if quantised else len(keys)
    fused = quantised and accumulators == torch.float16 and top_k <= MAX_SELECTED
    fused = fused and most >= FUSED_KEYS and min(len(q), workspace // FUSED_BYTES) >= FUSED_TOKENS
    tokens = max(1, workspace // (FUSED_BYTES if fused else 4 * columns))
    tokens = -(-len(q) // -(-len(q) // tokens))  # as many at each time
    found = []
    for first in range(0, len(q), tokens):
        part = slice(first, first + tokens)
        begins, counts = starts[part], lengths[part]
        given = q[part], keys, weights[part], begins, begins + counts
        own = paging if row_to_seq is None else paging | {"row_to_seq": row_to_seq[part]}
        if fused:
            found.append(dsa.indexer_select(*given, top_k, accumulators=accumulators, **own))
        elif quantised:
            options = {"clean_logits": False, "max_seqlen_k": most, "accumulators": accumulators}
            # Scores end with the call, before there are the next ones.
            found.append(dsa.topk_indices(dsa.fp8_mqa_logits(*given, **options), top_k, lengths=counts, **own))
        else:
            found.append(dsa.topk_indices(dsa.mqa_logits(*given), top_k, starts=begins, lengths=counts, **own))
    return found[0] if len(found) == 1 else torch.cat(found)


def _select_by_sequence(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    top_k: int,
    lengths: torch.Tensor,
    key_lens: Sequence[int],
    workspace: int,
    row_to_seq: torch.Tensor | None,
    **paging: torch.Tensor | int,
) -> torch.Tensor:
    """Of as many sequences at a time as have scores of `workspace` bytes, or of one."""
    tokens, own_keys, most, found = len(q) // len(key_lens), keys.split(key_lens), max(key_lens), []
    sequences = max(1, workspace // (4 * tokens * most))
    for first in range(0, len(key_lens), sequences):
        part = slice(first * tokens, (first + sequences) * tokens)
        scores = _scores_by_sequence(q[part], own_keys[first : first + sequences], weights[part], most)
        own = paging if row_to_seq is None else paging | {"row_to_seq": row_to_seq[part]}
        found.append(dsa.topk_indices(scores, top_k, lengths=lengths[part], **own))
    return found[0] if len(found) == 1 else torch.cat(found)


@without_autocast
def _scores_by_sequence(
    q: torch.Tensor, keys: Sequence[torch.Tensor], weights: torch.Tensor, columns: int
) -> torch.Tensor:
    """fp32 [T, columns]: the scores of each token with all keys of its sequence; undefined behind these."""
    scores = weights.new_empty(len(q), columns)
    if scores.device.type == "meta":  # nothing to compute, and no kernels to be asked for
        return scores
    of_sequences = (x.unflatten(0, (len(keys), -1)) for x in (q, weights, scores))
    for own_q, own_weights, own_scores, own_keys in zip(*of_sequences, keys):
        own_scores[:, : len(own_keys)] = index_scores(own_q, own_keys, own_weights)
    return scores


def select_paged(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    weights: torch.Tensor,
    top_k: int,
    lengths: torch.Tensor,
    view: DecodingView,
    most: int,
    page_size: int | None = None,
) -> torch.Tensor:
    """Selects for the last tokens of sequences, one or a few of each, among keys in pages of FP8 bytes, where they are.

    lengths int32 [B], or [B, next_n] of several tokens a sequence: how many keys each sees; most: an upper bound of
    them; view: of the pass's keys. With page_size, the keys of a page, the result has slots in the cache in place of
    positions. Returns as `select_packed`.
    """
    q = q.unflatten(0, (len(lengths), -1))
    scores = dsa.fp8_paged_mqa_logits(q, pages, weights, lengths, block_table, view.index_schedule, most)
    paging = {} if page_size is None else {"block_table": block_table, "page_size": page_size}
    if page_size is not None and q.shape[1] > 1:
        paging["row_to_seq"] = view.sequences
    return dsa.topk_indices(scores, top_k, lengths=lengths.flatten(), **paging)
