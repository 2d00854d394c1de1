"""Write FP8 index keys into cache pages and read them back."""

import torch

from dsa.kernels.cache.limits import INDEX_HEAD_DIMS
from dsa.ops.cache._specs import BYTES, SLOTS, check_index_cache, pages_as_rows, slots_and_page_bytes
from dsa.reference.cache import indexer_cache as reference
from dsa.runtime.declare import CONTIGUOUS, E4M3, F32, PAGES, ROWS, Arguments, Tensor, check_apart, dtype_name, op

__all__ = ["read_indexer_cache", "write_indexer_cache"]

WRITE_INDEXER_CACHE = Arguments(
    first=("cache",),
    k=Tensor("T D", E4M3, layout=ROWS),
    k_scale=Tensor("T", F32),
    cache=Tensor("pages P 1 D+4", BYTES, rule=check_index_cache, layout=PAGES, written=True),
    slots=Tensor("T", SLOTS, layout=CONTIGUOUS),
)
READ_INDEXER_CACHE = Arguments(
    cache=Tensor("pages P 1 D+4", BYTES, rule=check_index_cache, layout=PAGES),
    slots=Tensor("T", SLOTS, layout=CONTIGUOUS),
)
LIMITS = {"D": INDEX_HEAD_DIMS, **slots_and_page_bytes("(D+4)")}
READ_OUT = {"k": Tensor("T D", E4M3, layout=ROWS), "k_scale": Tensor("T", F32)}


def write_indexer_cache(k: torch.Tensor, k_scale: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write token t's key and scale into slot slots[t] = page * P + offset of the cache, in place.

    k        [T, D] float8_e4m3fn
    k_scale  [T] fp32
    cache    [pages, P, 1, D + 4] uint8: each page has P x D values, then P fp32 scales. Any page stride
    slots    [T] int32 or int64; -1 skips the token. Two tokens must not share a slot

    Every other byte of the cache stays as it is. Raises TypeError or ValueError for other types, dtypes, shapes and
    strides. For a slot below -1 or beyond the cache the reference raises ValueError; the kernel skips the token.
    On Hopper: D in {32, 64, 128}, rows and pages at multiples of 16 bytes. CUDA-graph safe, no host synchronisation.
    Source: the cache of DeepGEMM's `fp8_paged_mqa_logits`.
    """
    _write_indexer_cache(k, k_scale, cache, slots)


def read_indexer_cache(
    cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor | None = None, k_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys in `slots` and their scales: (k [T, D] float8_e4m3fn, k_scale [T] fp32).

    cache       [pages, P, 1, D + 4] uint8, in the layout of `write_indexer_cache`
    slots       [T] int32 or int64, page * P + offset; -1 or any slot outside the cache gives key 0 and scale 0
    k, k_scale  None: the op allocates contiguous results. Or two tensors of the results' shapes and dtypes: the op
                writes the results to them, and writes nothing between their rows. They must not begin at the address of
                another argument

    Raises TypeError or ValueError for other types, dtypes, shapes and strides.
    On Hopper: the limits of `write_indexer_cache` on D, rows and pages. CUDA-graph safe, no host synchronisation.
    """
    if k is None and k_scale is None:
        return _read_indexer_cache(cache, slots)
    for name, value, other in (("k", k, "k_scale"), ("k_scale", k_scale, "k")):
        if value is None:
            raise ValueError(f"{name}: must be given where {other} is, got None")
    check_apart("k", k, cache=cache, slots=slots, k_scale=k_scale)
    check_apart("k_scale", k_scale, cache=cache, slots=slots)
    _read_indexer_cache.into(cache, slots, k, k_scale)
    return k, k_scale


@op(
    arguments=WRITE_INDEXER_CACHE,
    reference=reference.write_indexer_cache,
    limits=LIMITS,
)
def _write_indexer_cache(k: torch.Tensor, k_scale: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    if k.shape[0] and cache.shape[0]:
        _launch(k, k_scale, cache, slots, write=True)


def _read_results(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k = torch.empty(slots.shape[0], cache.shape[3] - 4, dtype=torch.float8_e4m3fn, device=cache.device)
    return k, torch.empty(slots.shape[0], dtype=torch.float32, device=cache.device)


@op(
    arguments=READ_INDEXER_CACHE,
    reference=reference.read_indexer_cache,
    results=_read_results,
    limits=LIMITS,
    out=READ_OUT,
)
def _read_indexer_cache(
    cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor | None, k_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if k is None or k_scale is None:
        k, k_scale = _read_results(cache, slots)
    if cache.shape[0] == 0:
        k.view(torch.uint8).zero_()
        k_scale.zero_()
    elif slots.shape[0]:
        _launch(k, k_scale, cache, slots, write=False)
    return k, k_scale


def _launch(k: torch.Tensor, k_scale: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *, write: bool) -> None:
    from dsa.kernels.cache.indexer_cache_sm90 import compile_indexer_cache

    rows = k.view(torch.uint8)
    if rows.shape[0] == 1:  # the stride of a single row is arbitrary
        rows = rows.as_strided(rows.shape, (rows.shape[1], 1))
    launch = compile_indexer_cache(k.shape[1], dtype_name(slots.dtype), write)
    launch(rows, k_scale, pages_as_rows(cache), slots, cache.shape[1])
