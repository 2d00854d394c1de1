"""A page of the indexer's key cache: P keys of D e4m3 values each, and after them P fp32 scales, one per key."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsa.cute.limits import MAX_SLOTS


@cute.jit
def find_slot(cache: cute.Tensor, slot, page_size: Int32, divisor: cute.FastDivmodDivisorV2):
    """-> (whether the cache has this slot, the slot's page, the slot's offset in the page).

    cache [pages, bytes]; divisor: `page_size`, prepared for fast division. Slots from MAX_SLOTS on count as outside the
    cache. For a slot outside the cache, page and offset are those of slot 0.
    """
    slots = cutlass.min(Int64(cache.shape[0]) * page_size, Int64(MAX_SLOTS))
    exists = Int64(slot) >= 0 and Int64(slot) < slots
    place = Int32(0)
    if exists:
        place = Int32(slot)
    page, offset = divmod(place, divisor)
    return exists, page, offset


@cute.jit
def page_planes(
    cache: cute.Tensor, page: Int32, page_size: Int32, dim: cutlass.Constexpr, value_type: cutlass.Constexpr
):
    """-> (values [P, D] of value_type, scales [P] fp32), views of page `page` of the cache. P is `page_size`, and D is
    `dim`. value_type is e4m3, or uint8 if values are only copied."""
    start = (cache.iterator + page * cache.stride[0]).align(16)
    values = cute.make_tensor(
        cute.recast_ptr(start, dtype=value_type), cute.make_layout((page_size, dim), stride=(dim, 1))
    )
    after_rows = (start + page_size * dim).align(16)
    return values, cute.make_tensor(cute.recast_ptr(after_rows, dtype=Float32), cute.make_layout(page_size))
