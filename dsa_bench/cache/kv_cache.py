"""Rows between tensors and pages of the MLA cache, beside plain torch operations: bytes a second against the copy
bandwidth of the same run."""

from functools import cache, partial

import torch

import dsa
from dsa.reference import per_token_cast_to_fp8
from dsa.testing import copy_bandwidth
from dsa_bench.harness.agreement import agree
from dsa_bench.harness.case import Call, Case

# tokens; what; the cache's layout. Rows are bf16.
SHAPES = [
    *((131072, what, layout) for layout in ("V3.2", "V4", "bf16") for what in ("write", "read")),
    *((64, what, "V3.2") for what in ("write", "read")),
]
PAGE = 64
DIMS = {"V3.2": 576, "V4": 512, "bf16": 576}
BYTES = {"V3.2": 656, "V4": 584, "bf16": 1152}
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def _pages(tokens: int, layout: str) -> torch.Tensor:
    pages = -(-tokens // PAGE)
    if layout == "V4":
        return dsa.make_v4_cache(pages, PAGE, "cuda")
    dtype = torch.uint8 if layout == "V3.2" else torch.bfloat16
    return torch.zeros(pages, PAGE, 1, 656 if layout == "V3.2" else 576, dtype=dtype, device="cuda")


def _parts(kv: torch.Tensor, nope: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes of the values and the rope channels, and scales."""
    values, scale = per_token_cast_to_fp8(kv[:, :nope], True, group)
    return values.view(torch.uint8), kv[:, nope:].contiguous().view(torch.uint8), scale


def _planes(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a V4 cache: rows [pages, P, 576] and scales [pages, P, 8]."""
    shape = pages.shape[:2]
    rows = pages.as_strided((*shape, 576), (pages.stride(0), 576, 1))
    return rows, pages.as_strided((*shape, 8), (pages.stride(0), 8, 1), PAGE * 576)


def _write(kv: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    dsa.write_kv_cache(kv, pages, slots)
    return pages


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


def _calls(tokens: int, what: str, layout: str) -> tuple[Call, Call]:
    pages, kv = _pages(tokens, layout), torch.randn(tokens, DIMS[layout], device="cuda").bfloat16()
    # As in a serving cache: pages in any order, the tokens of a page one after the other.
    order = torch.randperm(pages.shape[0], device="cuda")
    slots = (order[:, None] * PAGE + torch.arange(PAGE, device="cuda")).view(-1)[:tokens]
    if what == "write":
        # A cache of its own for each: what is in it is compared.
        return partial(_write, kv, pages, slots), partial(_torch_write, kv, _pages(tokens, layout), slots)
    dsa.write_kv_cache(kv, pages, slots)
    return partial(dsa.read_kv_cache, pages, slots, dtype=torch.bfloat16), partial(_torch_read, pages, slots)


def case(tokens: int, what: str, layout: str) -> Case:
    size = tokens * (2 * DIMS[layout] + BYTES[layout] + 8)
    count = min(64, max(2, int(_FRESH_BYTES / size)))
    ours, plain = map(list, zip(*(_calls(tokens, what, layout) for _ in range(count))))

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def agree_on_pages(theirs: torch.Tensor, own: torch.Tensor) -> None:
        slots = torch.arange(tokens, device=own.device)
        agree(*(dsa.read_kv_cache(pages, slots, dtype=torch.bfloat16) for pages in (theirs, own)))

    others = {"baselines": frozenset({"torch"}), "agree": agree_on_pages if what == "write" else agree}
    return Case(f"{what} {tokens} tokens, {layout}", {"dsa": ours, "torch": plain}, figure, graph=True, **others)
