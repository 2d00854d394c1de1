"""Launch the kernels that compute index scores, and the gradients of the warm-up loss with respect to the indexer's
inputs, for some of the q tiles.

A q tile is 128 consecutive queries of a sequence, or fewer at the sequence's end: then its last rows are missing.
q_tiles.py of the kernels lists the fields of a row of `q_tiles`. The scores of a q tile are stored as key_tiles tiles:
tile j has the scores of the q tile's queries for the keys 128 j to 128 j + 127 of the sequence.

There are Tq queries and Tk keys in all, and Hi index heads of di channels. Each call processes S q tiles:

q_tiles  int32 [S, 8]
scores   fp32 [S, N, 128 (row), 128 (key)], where N is at least the largest key_tiles. After `index_scores`, the kernel
         warmup_target_sm90.py overwrites the scores with dI, the gradient of the loss with respect to the scores. The
         first half of the bytes of rows 0 to 63 then contains the dI of these rows, bf16 [64, 128], and likewise for
         rows 64 to 127. dI is 0 for keys that a row does not see and for missing rows
active   int32 [S, 2 Hi, 2 N, 128]: bits (active_bits.py), written by `index_scores`, read by the gradients. There are 2
         Hi blocks of 64 (query, head) columns and 2 N blocks of 64 keys

These functions check nothing. Callers pass contiguous tensors at multiples of 16 bytes on one device, with Hi in
INDEX_HEADS and di in INDEX_CHANNELS.
"""

import torch

from dsa.kernels.training.limits import K_TILE, MAX_Q_TILES, Q_TILE
from dsa.runtime import backends


def active_shape(q_tiles: int, heads: int, key_tiles: int) -> tuple[int, int, int, int]:
    """Return the shape of `active` for these numbers of q tiles, index heads and key tiles. The last dimension has the
    32-bit words of a block of 64 x 64 products."""
    return q_tiles, 2 * heads, 2 * key_tiles, Q_TILE * K_TILE // (4 * 32)


def index_scores(
    q_idx: torch.Tensor,
    minus_k_idx: torch.Tensor,
    w: torch.Tensor,
    q_tiles: torch.Tensor,
    scores: torch.Tensor,
    active: torch.Tensor,
) -> None:
    """Write the scores sum_h w[t, h] relu(q_idx_h[t] . k_idx[j]) of queries t and keys j to `scores`, and to `active`
    whether each product q_idx_h[t] . k_idx[j] is above 0.

    q_idx        bf16 [Tq, Hi, di]; w fp32 [Tq, Hi]
    minus_k_idx  bf16 [Tk, di], -k_idx: the sign bit of a product with it is 1 if the product with k_idx is above 0

    Scores of keys that a query does not see and of missing rows are undefined.
    """
    from dsa.kernels.training import indexer_scores_sm90 as kernel

    tokens, heads, dim = q_idx.shape
    if 0 in (tokens, len(minus_k_idx), len(q_tiles)):
        return
    config = kernel.CONFIGS[heads, dim]
    work_tiles = Q_TILE * heads // config.columns  # per q tile
    launch = kernel.compile_indexer_scores(heads, dim, config)
    with backends.on_device(q_idx):
        ctas = min(backends.num_sms(q_idx.device), work_tiles * len(q_tiles))
        flat = q_idx.view(-1, dim), minus_k_idx, w, q_tiles, scores, active.view(torch.uint32)
        launch(*flat, _tile_counter(q_idx), ctas)


def index_query_grad(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w: torch.Tensor,
    q_tiles: torch.Tensor,
    scores: torch.Tensor,
    active: torch.Tensor,
    dq: torch.Tensor,
    dw: torch.Tensor,
) -> None:
    """Write the gradients of q_idx and w. With g_h[t] = sum_j dI[t, j] k_idx[j] over the keys whose product with
    q_idx_h[t] is above 0:
    dq[t, h] = w[t, h] g_h[t], bf16 [Tq, Hi, di]; dw[t, h] = q_idx_h[t] . g_h[t], fp32 [Tq, Hi]. Rows of queries in no q
    tile are not written, except that without keys all rows become 0.

    q_idx bf16 [Tq, Hi, di]; k_idx bf16 [Tk, di]; w fp32 [Tq, Hi].
    """
    from dsa.kernels.training import indexer_query_grad_sm90 as kernel

    tokens, heads, dim = q_idx.shape
    if 0 in (tokens, len(q_tiles)):
        return
    if len(k_idx) == 0:
        dq.zero_()
        dw.zero_()
        return
    config = kernel.CONFIGS[heads, dim]
    work_tiles = 2 * heads // config.column_blocks  # per q tile
    launch = kernel.compile_indexer_query_grad(heads, dim, config)
    with backends.on_device(q_idx):
        ctas = min(backends.num_sms(q_idx.device), work_tiles * len(q_tiles))
        flat = q_idx.view(-1, dim), k_idx, w.view(-1), q_tiles, gradients_in(scores), active.view(torch.uint32)
        launch(*flat, dq.view(-1, dim), dw.view(-1), _tile_counter(q_idx), ctas)


def index_key_grad(
    q_idx: torch.Tensor,
    w: torch.Tensor,
    q_tiles: torch.Tensor,
    scores: torch.Tensor,
    active: torch.Tensor,
    dk: torch.Tensor,
) -> None:
    """dk[j] += sum_{t, h} dI[t, j] w[t, h] q_idx_h[t] over the active (t, h), those with q_idx_h[t] . k_idx[j] above 0.

    dk fp32 [Tk, di]; q_idx bf16 [Tq, Hi, di]; w bf16 [Tq, Hi], because the kernel multiplies dI by w in bf16.
    Deterministic.
    """
    from dsa.kernels.training import indexer_key_grad_sm90 as kernel

    tokens, heads, dim = q_idx.shape
    if 0 in (tokens, len(dk), len(q_tiles)):
        return
    config = kernel.CONFIGS[heads, dim]
    launch = kernel.compile_indexer_key_grad(heads, dim, config)
    with backends.on_device(q_idx):
        ctas = backends.num_sms(q_idx.device)
        flat, weights = q_idx.view(-1, dim), w.view(-1)
        partial_sums = torch.empty(ctas, 2, config.keys, dim, dtype=torch.float32, device=q_idx.device)
        fixup = torch.empty(ctas, 8, dtype=torch.int32, device=q_idx.device)
        di, words = gradients_in(scores), active.view(torch.uint32)
        for first in range(0, len(q_tiles), MAX_Q_TILES):
            some = slice(first, first + MAX_Q_TILES)
            launch(flat, weights, q_tiles[some], di[some], words[some], dk, partial_sums, fixup)


def _tile_counter(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def gradients_in(scores: torch.Tensor) -> torch.Tensor:
    """Return a view of dI in the memory of `scores`: bf16 [S, N, 2, 64 (row), 128 (key)]."""
    halves = scores.view(torch.bfloat16)
    q_tile, key_tile, *_ = halves.stride()
    shape, strides = (*scores.shape[:2], 2, Q_TILE // 2, K_TILE), (q_tile, key_tile, Q_TILE * K_TILE, K_TILE, 1)
    return halves.as_strided(shape, strides)
