"""Paged cache of MLA's latents, one row of d numbers per token: floats, or one of two layouts of bytes with FP8 values.

The cache's dtype and last dimension determine the layout. P is the page size.
  float   [pages, P, 1, d] fp32, bf16 or fp16.
  V3.2    [pages, P, 1, 656] bytes, d = 576. Per token: 512 e4m3 | 4 fp32 scales, one per 128 e4m3 | 64 bf16 (rope).
          Any fp32 number is a valid scale, and is used at full precision.
  V4      [pages, P, 1, 584] bytes, d = 512. Per page: P x (448 e4m3 | 64 bf16 (rope)), then P x 8 bytes of scales:
          7 ue8m0 scales, one per 64 e4m3, and a pad byte. The shape only gives the number of bytes: the scales follow
          the rows of the whole page. Pages may be more than P * 584 bytes apart (cache.stride(0)).
Bytes are uint8, int8 or float8_e4m3fn; multi-byte numbers are little endian. Scales multiply: value = e4m3 * scale.
Source: FlashMLA's FP8 caches.
"""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.indexer_cache import check_writable_slots, split_slots
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8

V32_BYTES, V32_DIM, V32_NOPE, V32_GROUP = 656, 576, 512, 128
V4_BYTES, V4_DIM, V4_NOPE, V4_GROUP = 584, 512, 448, 64
V4_ROW = V4_NOPE + 2 * (V4_DIM - V4_NOPE)
V4_SCALE_ROW = V4_BYTES - V4_ROW
BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


def row_dim(cache: torch.Tensor) -> int:
    if cache.dtype not in BYTE_DTYPES:
        return cache.shape[-1]
    return V32_DIM if cache.shape[-1] == V32_BYTES else V4_DIM


def is_v4(cache: torch.Tensor) -> bool:
    return cache.dtype in BYTE_DTYPES and cache.shape[-1] == V4_BYTES


def make_v4_cache(pages: int, page_size: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return a zeroed V4 cache [pages, page_size, 1, 584] uint8 whose page stride is padded to a multiple of 576
    bytes."""
    stride = -(-page_size * V4_BYTES // V4_ROW) * V4_ROW
    data = torch.zeros(pages, stride, dtype=torch.uint8, device=device)
    return data[:, : page_size * V4_BYTES].unflatten(1, (page_size, 1, V4_BYTES))


@torch.no_grad()
@without_autocast
def write_kv_cache(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, use_ue8m0: bool = True) -> None:
    """Write token t's row into slot slots[t] = page * P + offset, in place.

    The e4m3 values and scales of byte caches are those of `fp8_cast.per_token_cast_to_fp8`, for groups of 128 channels
    (V3.2) or 64 (V4). The rope channels of byte caches are rounded to bf16; a float cache rounds all channels to its
    dtype. Slot -1 skips the token. V4's pad byte is set to 0; no other byte of the cache changes. Raises ValueError,
    before it writes, for a slot below -1 or beyond the cache. Arguments as in `dsa.write_kv_cache`.
    """
    check_writable_slots(slots, cache.shape[0] * cache.shape[1])
    keep = slots >= 0
    kv = kv[keep]
    page, offset = split_slots(slots[keep], cache.shape[1])
    if cache.dtype not in BYTE_DTYPES:
        cache[page, offset, 0] = kv.to(cache.dtype)
    elif not is_v4(cache):
        q, scale = per_token_cast_to_fp8(kv[:, :V32_NOPE], use_ue8m0, V32_GROUP)
        row = torch.cat((_as_bytes(q), _as_bytes(scale), _as_bytes(kv[:, V32_NOPE:].bfloat16())), dim=1)
        cache.view(torch.uint8)[page, offset, 0] = row
    else:
        q, scale = per_token_cast_to_fp8(kv[:, :V4_NOPE], True, V4_GROUP)
        rows, scales = _v4_planes(cache)
        rows[page, offset] = torch.cat((_as_bytes(q), _as_bytes(kv[:, V4_NOPE:].bfloat16())), dim=1)
        scales[page, offset] = torch.nn.functional.pad(_as_bytes(scale.to(torch.float8_e8m0fnu)), (0, 1))


@without_autocast
def read_kv_cache(cache: torch.Tensor, slots: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the rows in `slots`, [..., d], in fp32 or rounded from fp32 to `dtype`; zeros for slots outside the cache.

    Arguments as in `dsa.read_kv_cache`.
    """
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    page, offset = split_slots(slots[valid], cache.shape[1])
    out = torch.zeros(*slots.shape, row_dim(cache), dtype=torch.float32, device=cache.device)
    if cache.dtype not in BYTE_DTYPES:
        out[valid] = cache[page, offset, 0].float()
    elif not is_v4(cache):
        row = cache.view(torch.uint8)[page, offset, 0]
        scale_end = V32_NOPE + 4 * (V32_NOPE // V32_GROUP)
        scale = row[:, V32_NOPE:scale_end].contiguous().view(torch.float32)
        out[valid] = _decode(row[:, :V32_NOPE], scale, row[:, scale_end:])
    else:
        rows, scales = _v4_planes(cache)
        row = rows[page, offset]
        scale = scales[page, offset][:, : V4_NOPE // V4_GROUP].contiguous().view(torch.float8_e8m0fnu).float()
        out[valid] = _decode(row[:, :V4_NOPE], scale, row[:, V4_NOPE:])
    return out.to(dtype)


def _decode(nope: torch.Tensor, scale: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Return [T, d] fp32. nope [T, n] e4m3 bytes, scale [T, n / group] fp32, rope [T, 2 (d - n)] bytes of bf16."""
    values = nope.view(torch.float8_e4m3fn).float().unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(2)
    return torch.cat((values.flatten(1), rope.contiguous().view(torch.bfloat16).float()), dim=1)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def _v4_planes(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a V4 cache's bytes: rows [pages, P, 576] and scales [pages, P, 8]."""
    pages, page_size = cache.shape[:2]
    raw = cache.view(torch.uint8)
    start, stride = raw.storage_offset(), raw.stride(0)
    rows = raw.as_strided((pages, page_size, V4_ROW), (stride, V4_ROW, 1), start)
    scales = raw.as_strided((pages, page_size, V4_SCALE_ROW), (stride, V4_SCALE_ROW, 1), start + page_size * V4_ROW)
    return rows, scales
