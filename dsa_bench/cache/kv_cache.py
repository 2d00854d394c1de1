"""Copies of rows between tensors and pages of the MLA cache, compared with plain torch operations: bytes per second
and their share of the copy bandwidth."""

from functools import partial

import torch

import dsa
from dsa.reference import per_token_cast_to_fp8
from dsa_bench.cache._pages import BYTES, DIMS, PAGE, empty_pages, same_contents, shuffled_slots
from dsa_bench.harness.case import Call, Case, agree, bf16, bytes_rate, fresh_calls, into

# tokens; direction; the cache's layout. Rows are bf16.
SHAPES = [
    *((131072, what, layout) for layout in ("V3.2", "V4", "bf16") for what in ("write", "read")),
    *((64, what, "V3.2") for what in ("write", "read")),
]


def _parts(kv: torch.Tensor, nope: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first `nope` channels in FP8 as bytes, the other channels as bytes, and the fp32 scales of the FP8
    channels."""
    values, scale = per_token_cast_to_fp8(kv[:, :nope], True, group)
    return values.view(torch.uint8), kv[:, nope:].contiguous().view(torch.uint8), scale


def _planes(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two parts of a V4 cache: rows [pages, P, 576] and scales [pages, P, 8]."""
    shape = pages.shape[:2]
    rows = pages.as_strided((*shape, 576), (pages.stride(0), 576, 1))
    return rows, pages.as_strided((*shape, 8), (pages.stride(0), 8, 1), PAGE * 576)


def _torch_write(kv: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    page, offset = slots // PAGE, slots % PAGE
    if pages.is_floating_point():
        pages[page, offset, 0] = kv
    elif kv.shape[1] == 576:
        values, rope, scale = _parts(kv, 512, 128)
        pages[page, offset, 0] = torch.cat((values, scale.view(torch.uint8), rope), 1)
    else:
        values, rope, scale = _parts(kv, 448, 64)
        rows, scales = _planes(pages)
        rows[page, offset] = torch.cat((values, rope), 1)
        exponents = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
        scales[page, offset] = torch.nn.functional.pad(exponents, (0, 1))
    return pages


def _torch_read(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    page, offset = slots // PAGE, slots % PAGE
    if pages.is_floating_point():
        return pages[page, offset, 0]
    if pages.shape[3] == 656:
        row = pages[page, offset, 0]
        values, scale, rope = row[:, :512], row[:, 512:528].contiguous().view(torch.float32), row[:, 528:]
    else:
        rows, scales = _planes(pages)
        row = rows[page, offset]
        values, scale = row[:, :448], scales[page, offset][:, :7].contiguous().view(torch.float8_e8m0fnu).float()
        rope = row[:, 448:]
    numbers = values.view(torch.float8_e4m3fn).float().unflatten(1, (scale.shape[1], -1)) * scale[:, :, None]
    return torch.cat((numbers.flatten(1).bfloat16(), rope.contiguous().view(torch.bfloat16)), 1)


def _calls(tokens: int, what: str, layout: str) -> dict[str, Call]:
    pages, kv, slots = empty_pages(tokens, layout), bf16(tokens, DIMS[layout]), shuffled_slots(tokens)
    if what == "write":
        # Separate caches, because their contents are compared.
        return {
            "dsa": partial(into, pages, partial(dsa.write_kv_cache, kv, pages, slots)),
            "torch": partial(_torch_write, kv, empty_pages(tokens, layout), slots),
        }
    dsa.write_kv_cache(kv, pages, slots)
    return {
        "dsa": partial(dsa.read_kv_cache, pages, slots, dtype=torch.bfloat16),
        "torch": partial(_torch_read, pages, slots),
    }


def case(tokens: int, what: str, layout: str) -> Case:
    size = tokens * (2 * DIMS[layout] + BYTES[layout] + 8)

    return Case(
        f"{what} {tokens} tokens, {layout}",
        fresh_calls(size, partial(_calls, tokens, what, layout)),
        bytes_rate(size),
        graph=True,
        baselines={"torch"},
        agree=same_contents(partial(dsa.read_kv_cache, dtype=torch.bfloat16), torch.arange(tokens, device="cuda"))
        if what == "write"
        else agree,
    )
