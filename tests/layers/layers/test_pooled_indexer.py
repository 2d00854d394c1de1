"""The indexer of pools: the tokens of selected pools, and selection compared with its formula."""

import pytest
import torch

from dsa_layers import SequenceBatch, fuse
from dsa_layers.layers.pooled_indexer import PooledIndexer, tokens_of_pools

HIDDEN, RANK, DIM, POOL, TOP_K = 32, 16, 8, 4, 12


def test_tokens_of_selected_pools_come_first_and_then_the_tail():
    pools = torch.tensor([[-1, -1], [0, -1], [0, -1], [0, 1], [1, 4]], dtype=torch.int32)
    visible = torch.tensor([3, 4, 6, 8, 23], dtype=torch.int32)
    expected = [
        [0, 1, 2, *[-1] * 8],
        [0, 1, 2, 3, *[-1] * 7],
        [0, 1, 2, 3, 4, 5, *[-1] * 5],
        [*range(8), *[-1] * 3],
        [4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22],
    ]
    found = tokens_of_pools(pools, visible, 4)
    assert found.dtype == torch.int32 and found.tolist() == expected


def indexer(**options):
    torch.manual_seed(1)
    sizes = {"n_heads": 4, "head_dim": DIM, "top_k": TOP_K, "pool": POOL, "quantize": False}
    made = PooledIndexer(HIDDEN, RANK, **sizes | options)
    for parameter in (made.index_kpool_compress_ape, made.index_kpool_compress_gate):
        torch.nn.init.normal_(parameter)
    return made


@torch.no_grad()
def selected_by_formula(made, x, qr):
    """Return, for each token of one sequence, the list of tokens that it selects."""
    k, z = made.k_norm(made.wk(x)), x @ made.index_kpool_compress_gate.T
    count = len(x) // POOL
    weights = (z[: count * POOL].unflatten(0, (count, POOL)) + made.index_kpool_compress_ape).softmax(1)
    keys = (weights * k[: count * POOL].unflatten(0, (count, POOL))).sum(1)
    q, w = made.wq_b(qr).unflatten(-1, (4, DIM)), made.weights_proj(x) * made.weight_scale
    scores, found = (torch.einsum("thd,pd->thp", q, keys).relu() * w[..., None]).sum(1), []
    for t, row in enumerate(scores):
        complete = (t + 1) // POOL
        pools = row[:complete].topk(min(TOP_K // POOL, complete)).indices.sort().values.tolist()
        found.append([POOL * p + j for p in pools for j in range(POOL)] + [*range(complete * POOL, t + 1)])
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_selection_follows_the_formula(fused):
    made, lens = indexer(), [30, 3, 25]
    x, qr = torch.randn(sum(lens), HIDDEN), torch.randn(sum(lens), RANK)
    expected = [row for own in zip(x.split(lens), qr.split(lens)) for row in selected_by_formula(made, *own)]
    angles = torch.ones(len(x), DIM // 2), torch.zeros(len(x), DIM // 2)
    found = (fuse(made) if fused else made).select(x, qr, angles, SequenceBatch.without_cache(lens))
    assert found.shape == (len(x), TOP_K + POOL - 1)
    assert [[token for token in row if token >= 0] for row in found.tolist()] == expected


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"top_k": 10}, "^top_k: must be a multiple of pool=4, got 10"),
        ({"pool": 0}, "^pool: must be at least 1, got 0"),
    ],
)
def test_wrong_sizes_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        indexer(**options)
