"""DeepGEMM's FP8 products for gradients of weights, recipe (1, 1, 128): both operands have a scale per row and 128
channels, and the sums are accumulated in fp32.

The FP8 kernels of dsa accept a scale per 128 x 128 block of b, but not a scale per row. PyTorch dequantizes both
operands to fp32, 4 bytes per value of a and b, and multiplies them in fp32, or in TF32 if the user has enabled TF32 in
PyTorch. In fp32 the result differs from the formula only by rounding, but without FP8 tensor cores this takes many
times as long as DeepGEMM's kernels.
"""

from collections.abc import Sequence

import torch

from dsa.compat.deep_gemm.arguments import ROW_SCALES, check_result, find_recipe, operands, refuse
from dsa.ops.gemm.fp8_gemm_nt import Scaled
from dsa.runtime import backends
from dsa.runtime.checks import E4M3, INT32, check_flag, check_int, check_same_device, check_tensor, shape_of

BLOCK = 128

_FP32 = (torch.float32,)


def k_grouped_fp8_gemm_nt_contiguous(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    ks_cpu: Sequence[int],
    grouped_layout: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Sequence[int] = ROW_SCALES,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
    epilogue: object = None,
) -> None:
    """d[g] = c[g] + a_g b_g^T, where the groups a_g [M, K_g] and b_g [N, K_g] can differ in K_g.

    a               (e4m3, fp32 [M, sum(K_g) / 128]): the values of all a_g, each row-major, one group after another:
                    M sum(K_g) values in a contiguous tensor of any shape
    b               (e4m3, fp32 [N, sum(K_g) / 128]): the values of all b_g, stored like those of a
    d               fp32 [G, M, N]
    ks_cpu          K_g of each group: G multiples of 128; 0 is allowed
    grouped_layout  int32 [G] on the device: the numbers of ks_cpu again, for DeepGEMM's kernel. They are not read here
    c               fp32 [G, M, N], which may be d itself; None: 0

    `use_psum_layout` must be False, as in DeepGEMM on Hopper. PyTorch computes one product per group in fp32.
    """
    (q, s), (w, ws) = operands(a, b)
    refuse(epilogue=epilogue)
    find_recipe(recipe, None, None, (ROW_SCALES,))
    check_flag("use_psum_layout", use_psum_layout)
    if use_psum_layout:
        raise ValueError(f"use_psum_layout: must be False on Hopper, got {use_psum_layout}")
    check_tensor("d", d, _FP32, ("G", "M", "N"))
    groups, rows, columns = d.shape
    channels = _check_channels(ks_cpu, groups)
    check_tensor("grouped_layout", grouped_layout, INT32, (groups,), "d")
    _check_flat("a", q, s, rows, channels)
    _check_flat("b", w, ws, columns, channels)
    _check_destination(d, c, {"a[0]": q, "a[1]": s, "b[0]": w, "b[1]": ws})
    check_same_device(("a[0]", q), **{"a[1]": s, "b[0]": w, "b[1]": ws, "grouped_layout": grouped_layout})
    backends.note_reference_only("compat.deep_gemm.k_grouped_fp8_gemm_nt_contiguous", d)
    _start_from(d, c)
    begin = 0
    for g, size in enumerate(ks_cpu):
        end, blocks = begin + size, slice(begin // BLOCK, (begin + size) // BLOCK)
        a_g = q.view(-1)[rows * begin : rows * end].view(rows, size)
        b_g = w.view(-1)[columns * begin : columns * end].view(columns, size)
        d[g].addmm_(_dequantize(a_g, s[:, blocks]), _dequantize(b_g, ws[:, blocks]).T)
        begin = end


def write_gradient(d: torch.Tensor, c: torch.Tensor | None, a: Scaled, b: Scaled) -> None:
    """Write d = c + a b^T: `fp8_fp4_gemm_nt` with recipe (1, 1, 128)."""
    (q, s), (w, ws) = a, b
    check_tensor("a[0]", q, E4M3, ("M", "K"))
    check_tensor("b[0]", w, E4M3, ("N", q.shape[1]), "a[0]")
    blocks = -(-q.shape[1] // BLOCK)
    check_tensor("a[1]", s, _FP32, (len(q), blocks), "a[0]")
    check_tensor("b[1]", ws, _FP32, (len(w), blocks), "b[0]")
    check_tensor("d", d, _FP32, (len(q), len(w)), "a[0] and b[0]")
    _check_destination(d, c, {"a[0]": q, "a[1]": s, "b[0]": w, "b[1]": ws})
    check_same_device(("a[0]", q), **{"a[1]": s, "b[0]": w, "b[1]": ws})
    backends.note_reference_only("compat.deep_gemm.fp8_fp4_gemm_nt with recipe (1, 1, 128)", d)
    _start_from(d, c)
    d.addmm_(_dequantize(q, s), _dequantize(w, ws).T)


def _start_from(d: torch.Tensor, c: torch.Tensor | None) -> None:
    if c is None:
        d.zero_()
    else:
        d.copy_(c)


def _dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return x[m, k] = q[m, k] scale[m, k // 128] in fp32; the last block of channels may be smaller."""
    return q.float().mul_(scale.repeat_interleave(BLOCK, 1)[:, : q.shape[1]])


def _check_channels(ks_cpu: Sequence[int], groups: int) -> int:
    if not isinstance(ks_cpu, (list, tuple)) or len(ks_cpu) != groups:
        got = f"{len(ks_cpu)} of them" if isinstance(ks_cpu, (list, tuple)) else type(ks_cpu).__name__
        raise ValueError(f"ks_cpu: must be {groups} ints, one per group of d, got {got}")
    for g, size in enumerate(ks_cpu):
        check_int(f"ks_cpu[{g}]", size, 0)
        if size % BLOCK:
            raise ValueError(f"ks_cpu[{g}]: must be a multiple of {BLOCK}, got {size}")
    return sum(ks_cpu)


def _check_flat(name: str, values: torch.Tensor, scales: torch.Tensor, rows: int, channels: int) -> None:
    check_tensor(f"{name}[0]", values, E4M3, shape_of(values))
    if values.numel() != rows * channels or not values.is_contiguous():
        raise ValueError(
            f"{name}[0]: must be contiguous with {rows} x {channels} values (sizes as of d and ks_cpu), got shape "
            f"{list(values.shape)} with strides {list(values.stride())}"
        )
    check_tensor(f"{name}[1]", scales, _FP32, (rows, channels // BLOCK), "d and ks_cpu")


def _check_destination(d: torch.Tensor, c: torch.Tensor | None, operands: dict[str, torch.Tensor]) -> None:
    """Check d and c. d is written before the operands are read, so d must not overlap them. d may be c itself;
    otherwise it must not overlap c."""
    q = operands["a[0]"]
    check_result(d, q)
    for name, x in operands.items():
        if _overlap(d, x):
            raise ValueError(f"d: is written, must not share memory with {name}, got overlapping tensors")
    if c is not None:
        check_tensor("c", c, _FP32, tuple(d.shape), "d")
        check_same_device(("a[0]", q), c=c)
        if c.data_ptr() != d.data_ptr() and _overlap(d, c):
            raise ValueError("c: must be d itself or share no memory with d, got overlapping tensors")


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether the address ranges of two tensors overlap. A range goes from the first to the last element."""
    if x.is_meta or y.is_meta or not x.numel() or not y.numel():
        return False
    (begin, end), (first, last) = map(_range, (x, y))
    return begin < last and first < end


def _range(x: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
