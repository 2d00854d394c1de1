"""Index tensors of training: packed sequences and lists of keys, each with the gradients of all inputs."""

from collections.abc import Sequence

import torch

import dsa
from tests.hostile import IndexArgument, Prepared, Results
from tests.hostile.unconcerned import others, rows, rows_of

BF16 = torch.bfloat16
# Of each packed sequence: one longer than a tile of 128 queries, one without queries, one whose first queries see none.
QUERIES, KEYS = (130, 0, 7, 5), (140, 4, 3, 70)


def starts(lengths: Sequence[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def leaves(device: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device).to(BF16).requires_grad_() for shape in shapes]


def with_gradients(outputs: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor], inputs: list) -> Results:
    """The outputs, and the inputs' gradients for the first of them."""
    grads = torch.autograd.grad(outputs[: len(upstream)], inputs, upstream, materialize_grads=True)
    return [x.detach() for x in (*outputs, *grads)]


def packed_places(of_queries: Sequence, of_keys: Sequence) -> dict:
    """Every number of cu_seqlens with the rows of the sequences that it is not between. of_queries, of_keys: of each
    result the dimension of its queries or keys, None where it has none; one of both."""
    bounds_q, bounds_k = starts(QUERIES), starts(KEYS)
    places = {}
    for i in range(len(QUERIES) + 1):
        rest = others(len(QUERIES), i - 1, i)
        kept = [
            (dim_q, rows_of(bounds_q, rest)) if dim_q is not None else (dim_k, rows_of(bounds_k, rest))
            for dim_q, dim_k in zip(of_queries, of_keys)
        ]
        places[f"number {i}"] = (i, rows(*kept))
    return places


def warmup(device: str, which: int, dims: tuple[int, int], heads: int, index_heads: int, causal: bool) -> Prepared:
    (dim, value_dim), absorbed = dims, dims == (576, 512)
    tq, tk, key_heads = sum(QUERIES), sum(KEYS), 1
    shapes = (tq, heads, dim), (tk, key_heads, dim), (tk, key_heads, value_dim)
    q, k, v = leaves(device, *shapes)
    indexer = leaves(device, (tq, index_heads, 64), (tk, 64), (tq, index_heads))
    bounds = [torch.tensor(starts(x), dtype=torch.int32, device=device) for x in (QUERIES, KEYS)]
    upstream = [torch.randn(tq, heads, value_dim, device=device).to(BF16)]
    upstream.append(torch.randn(tq, device=device))

    def run(cu_seqlens: torch.Tensor) -> Results:
        own = [cu_seqlens if i == which else x for i, x in enumerate(bounds)]
        values = k[..., :value_dim] if absorbed else v
        out, lse, kl = dsa.indexer_warmup_attention(
            q, k, values, *indexer, *own, max(QUERIES), max(KEYS), dim**-0.5, causal
        )
        inputs = [q, k, *([] if absorbed else [v]), *indexer]
        return with_gradients((out, kl, lse), upstream, inputs)

    of_queries = (0, 0, 1, 0, None, *(() if absorbed else (None,)), 0, None, 0)
    of_keys = [0 if dim is None else None for dim in of_queries]
    return Prepared(run, bounds[which], packed_places(of_queries, of_keys), exact=False)


def top_k(device: str, which: int) -> Prepared:
    tq, tk = sum(QUERIES), sum(KEYS)
    indexer = [x.detach() for x in leaves(device, (tq, 8, 64), (tk, 64), (tq, 8))]
    bounds = [torch.tensor(starts(x), dtype=torch.int32, device=device) for x in (QUERIES, KEYS)]

    def run(cu_seqlens: torch.Tensor) -> Results:
        own = [cu_seqlens if i == which else x for i, x in enumerate(bounds)]
        return [dsa.indexer_topk(*indexer, 16, *own, max(QUERIES), max(KEYS))]

    return Prepared(run, bounds[which], packed_places([0], [None]))


TOKENS, TK, TOP_K = 3, 150, 70


def topk_indices(device: str) -> torch.Tensor:
    """[TOKENS, 1, TOP_K]: the last query has half as many keys."""
    found = torch.stack([torch.randperm(TK)[:TOP_K] for _ in range(TOKENS)]).int()
    found[-1, TOP_K // 2 :] = -1
    return found[:, None].to(device)


def places_in_lists(valid: torch.Tensor, of_queries: Sequence, of_keys: Sequence) -> dict:
    """Numbers of two queries, with the other queries and the keys that these two queries do not name. A result that is
    of neither sums over the queries."""
    places = {}
    for query, entry in ((0, 0), (0, TOP_K - 1), (TOKENS - 1, TOP_K - 1), (TOKENS - 1, 3)):
        named = set(valid[query, 0].tolist())
        kept = []
        for dim_q, dim_k in zip(of_queries, of_keys):
            if dim_q is None and dim_k is None:
                kept.append(None)
            elif dim_q is not None:
                kept.append((dim_q, others(TOKENS, query)))
            else:
                kept.append((dim_k, others(TK, *named)))
        places[f"entry {entry} of query {query}"] = ((query, 0, entry), rows(*kept))
    return places


def sparse_attention(device: str, dim: int, heads: int, sink: bool, deterministic: bool) -> Prepared:
    q, kv = leaves(device, (TOKENS, heads, dim), (TK, 1, dim))
    sinks = [torch.randn(heads, device=device, requires_grad=True)] if sink else []
    valid = topk_indices(device)
    upstream = [torch.randn(TOKENS, heads, 512, device=device).to(BF16), torch.randn(heads, TOKENS, device=device)]

    def run(indices: torch.Tensor) -> Results:
        outputs = dsa.sparse_mla_attention(q, kv, indices, dim**-0.5, 512, *(sinks or [None]), deterministic)
        return with_gradients(outputs, upstream, [q, kv, *sinks])

    # The sink's gradient is a sum over all queries.
    of_queries, of_keys = (0, 1, 0, None, *[None] * sink), (None, None, None, 0, *[None] * sink)
    return Prepared(run, valid, places_in_lists(valid, of_queries, of_keys), exact=False)


def sparse_loss(
    device: str, dim: int, heads: int, index: tuple[int, int], joint: bool, deterministic: bool
) -> Prepared:
    index_heads, index_dim = index
    q, kv = (x.detach() for x in leaves(device, (TOKENS, heads, dim), (TK, 1, dim)))
    indexer = leaves(device, (TOKENS, index_heads, index_dim), (TK, index_dim), (TOKENS, index_heads))
    valid, upstream = topk_indices(device), [torch.randn(TOKENS, device=device)]
    lse = torch.randn(heads, TOKENS, device=device) + 5 if joint else None

    def run(indices: torch.Tensor) -> Results:
        kl = dsa.sparse_indexer_loss(q, kv, *indexer, indices, dim**-0.5, lse, deterministic)
        return with_gradients([kl], upstream, indexer)

    return Prepared(run, valid, places_in_lists(valid, (0, 0, None, 0), (None, None, 0, None)), exact=False)


def _of(op: str, argument: str, variant: str, prepare, *rest) -> IndexArgument:
    return IndexArgument(op, f"{argument} {variant}".strip(), lambda device: prepare(device, *rest))


WARMUPS = {
    "64": ((64, 64), 2, 8, True),
    "192": ((192, 128), 2, 16, True),
    "absorbed": ((576, 512), 2, 8, False),
}
BOUNDS = ("cu_seqlens_q", "cu_seqlens_k")

ARGUMENTS = [
    *(
        _of("indexer_warmup_attention", name, variant, warmup, i, *options)
        for variant, options in WARMUPS.items()
        for i, name in enumerate(BOUNDS)
    ),
    *(_of("indexer_topk", name, "", top_k, i) for i, name in enumerate(BOUNDS)),
    _of("sparse_mla_attention", "indices", "576", sparse_attention, 576, 64, True, False),
    _of("sparse_mla_attention", "indices", "512 few heads", sparse_attention, 512, 8, False, False),
    _of("sparse_mla_attention", "indices", "576 deterministic", sparse_attention, 576, 8, False, True),
    _of("sparse_indexer_loss", "indices", "576", sparse_loss, 576, 2, (8, 64), False, False),
    _of("sparse_indexer_loss", "indices", "512 joint", sparse_loss, 512, 66, (64, 128), True, False),
    _of("sparse_indexer_loss", "indices", "deterministic", sparse_loss, 576, 2, (8, 128), False, True),
]
