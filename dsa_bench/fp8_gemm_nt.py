"""FP8 products: TFLOP/s and bytes, one matrix and the experts of a mixture, beside DeepGEMM and torch."""

from functools import cache, partial
from typing import TYPE_CHECKING

import torch

import dsa
from dsa.testing import calc_diff, copy_bandwidth, fp8_gemm_rate
from dsa_bench.harness.case import Call, Case

if TYPE_CHECKING:
    from dsa.ops.fp8_gemm_nt import Scaled

# rows, columns, channels; experts and how many of them a row goes to, or None
# The first is the one that the status table shows.
SHAPES = [
    *((rows, 7168, 16384, None, None) for rows in (4096, 128, 1)),
    *((rows, 24576, 1536, None, None) for rows in (1, 128, 4096)),
    *((rows, 2112, 7168, None, None) for rows in (1, 128, 4096)),
    *((rows, 4096, 7168, 256, 8) for rows in (1, 64, 128, 4096, 16384)),
    *((rows, 7168, 2048, 256, 8) for rows in (1, 64, 128, 4096, 16384)),
]
_tensor_ceiling, _memory_ceiling = cache(fp8_gemm_rate), cache(copy_bandwidth)


def _deepgemm(a: "Scaled", b: "Scaled", ends: torch.Tensor | None, columns: int) -> dict[str, Call]:
    """With its scales laid out beforehand, and its groups' rows padded to multiples of 128, as it takes them."""
    try:
        import deep_gemm
    except ImportError:
        return {}
    if ends is None:
        out = torch.empty(len(a[0]), columns, dtype=torch.bfloat16, device="cuda")
        return {"deepgemm": partial(deep_gemm.fp8_gemm_nt, (a[0], _laid_out(a[1])), b, out)}
    sizes = ends.diff(prepend=ends.new_zeros(1))
    padded = (sizes + 127) // 128 * 128
    groups = torch.repeat_interleave(torch.arange(len(ends), device="cuda", dtype=torch.int32), padded)
    starts = padded.cumsum(0) - padded
    rows = torch.arange(len(a[0]), device="cuda") + torch.repeat_interleave(starts - (ends - sizes), sizes)
    q = torch.zeros(len(groups), a[0].shape[1], dtype=torch.uint8, device="cuda")
    q[rows] = a[0].view(torch.uint8)
    s = torch.ones(len(groups), a[1].shape[1], device="cuda")
    s[rows] = a[1]
    out = torch.empty(len(groups), columns, dtype=torch.bfloat16, device="cuda")
    operand = q.view(torch.float8_e4m3fn), _laid_out(s)
    return {"deepgemm": partial(deep_gemm.m_grouped_fp8_gemm_nt_contiguous, operand, b, out, groups)}


def _laid_out(scales: torch.Tensor) -> torch.Tensor:
    import deep_gemm

    return deep_gemm.get_mn_major_tma_aligned_tensor(scales)


def _torch(a: "Scaled", b: "Scaled") -> dict[str, Call]:
    """Its block-scaled product, where this build of it has one."""
    columns = a[1].t().contiguous().t()
    call = partial(torch._scaled_mm, a[0], b[0].t(), columns, b[1].t(), out_dtype=torch.bfloat16)
    try:
        call()
    except RuntimeError:
        return {}
    return {"torch": call}


def case(rows: int, columns: int, channels: int, experts: int | None, top_k: int | None) -> Case:
    lead = () if experts is None else (experts,)
    ends = None
    if experts is not None:
        picks = torch.rand(rows, experts, device="cuda").argsort(-1)[:, :top_k].flatten()
        ends = torch.bincount(picks, minlength=experts).cumsum(0).to(torch.int32)
    m = rows * (top_k or 1)
    blocks = channels // 128
    a = torch.randn(m, channels, device="cuda").to(torch.float8_e4m3fn), torch.rand(m, blocks, device="cuda") + 0.5
    # Bytes at random, but no NaN: as many numbers as these take long to draw.
    w = torch.randint(0, 127, (*lead, columns, channels), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    b = w, torch.rand(*lead, -(-columns // 128), blocks, device="cuda") + 0.5
    used = 1 if ends is None else int((ends.diff(prepend=ends.new_zeros(1)) > 0).sum())
    flop = 2 * m * columns * channels
    size = used * columns * channels + m * (channels + 2 * columns)

    def figure(ms: float) -> str:
        seconds = ms * 1e-3
        shares = (
            f"{flop / seconds / _tensor_ceiling():.0%} of FP8 GEMM, {size / seconds / _memory_ceiling():.0%} of copy"
        )
        return f"{flop / seconds / 1e12:.0f} TFLOP/s, {size / seconds / 1e12:.2f} TB/s; {shares}"

    arguments = (a, b) if ends is None else (a, b, ends)
    product = dsa.fp8_gemm_nt if ends is None else dsa.grouped_fp8_gemm_nt

    def check(got: torch.Tensor) -> None:
        with dsa.use_backend("reference"):
            expected = product(*arguments)
        if not (diff := calc_diff(got, expected)) < 1e-5:
            raise AssertionError(f"calc_diff {diff:.2g}")

    calls = {"dsa": [partial(product, *arguments)]}
    calls |= {name: [call] for name, call in _deepgemm(a, b, ends, columns).items()}
    if ends is None:
        calls |= {name: [call] for name, call in _torch(a, b).items()}
    name = f"{rows} x {columns} x {channels}" + ("" if experts is None else f", {top_k} of {experts} experts")
    return Case(name, calls, figure, check, graph=rows <= 128, repeats=15)
