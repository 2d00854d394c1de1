"""Casts and products."""

import torch

import dsa
from dsa.self_test.comparisons import check_product, check_rounded, hadamard
from dsa.testing import assert_close


def per_token_cast_to_fp8(device: str) -> None:
    x = torch.randn(33, 256, device=device).bfloat16()
    q, scale = dsa.per_token_cast_to_fp8(x)
    back = q.double() * scale.double().repeat_interleave(128, -1)
    check_rounded("x", back, x.double(), abs_tol=1e-2, rel_tol=2**-4, cos_tol=1e-3)
    q, scale = dsa.per_token_cast_to_fp8(x, hadamard=True)
    back = q.double().cpu() * scale.double().cpu().repeat_interleave(128, -1)
    expected = (x.double().cpu().view(33, 2, 128) @ hadamard()).view(33, 256)
    check_rounded("Hadamard x", back, expected, abs_tol=1e-2, rel_tol=2**-4, cos_tol=1e-3)


def fp8_gemm_nt(device: str) -> None:
    x, w = torch.randn(5, 384, device=device), torch.randn(200, 384, device=device)
    a, b = dsa.per_token_cast_to_fp8(x, False), dsa.per_block_cast_to_fp8(w, False)
    check_rounded("w", dsa.dequantize_per_block(*b), w.double(), abs_tol=1e-2, rel_tol=2**-4, cos_tol=1e-3)
    wide = a[0].double() * a[1].double().repeat_interleave(128, 1), dsa.dequantize_per_block(*b).double().T
    expected, size = wide[0] @ wide[1], (wide[0].square() @ wide[1].square()).sqrt()
    check_product("y", dsa.fp8_gemm_nt(a, b, torch.float32), expected, size)
    ends = torch.tensor((2, 2, 5), dtype=torch.int32, device=device)
    weights = b[0].expand(3, -1, -1).contiguous(), b[1] * torch.tensor((1.0, 8.0, 2.0), device=device)[:, None, None]
    expected, size = (torch.cat((x[:2], 2 * x[2:])) for x in (expected, size))
    check_product("grouped y", dsa.grouped_fp8_gemm_nt(a, weights, ends, torch.float32), expected, size)


def swiglu_cast_to_fp8(device: str) -> None:
    """The halves of one tensor, with a last block that ends early; then with a limit that many exceed."""
    gate, up = (2 * torch.randn(33, 400, device=device)).bfloat16().chunk(2, -1)
    for limit in (None, 1.0):
        q, scale = dsa.swiglu_cast_to_fp8(gate, up, limit=limit)
        g, u = gate.double(), up.double()
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        back = q.double() * scale.double().repeat_interleave(128, -1)[:, :200]
        expected, tolerance = g / (1 + (-g).exp()) * u, {"abs_tol": 4e-2, "rel_tol": 0.075, "cos_tol": 2e-3}
        if limit is None:
            check_rounded("h", back, expected, **tolerance)
        else:  # many numbers are the limit, and all of these are rounded alike
            assert_close("limited h", back, expected, **tolerance)
