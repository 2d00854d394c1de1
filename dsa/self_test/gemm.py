"""Casts and products."""

import torch

import dsa
from dsa.self_test.comparisons import check_product, check_rounded, check_same, hadamard
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


def scatter_cast_to_fp8(device: str) -> None:
    x = torch.randn(7, 256, device=device).bfloat16()
    places = torch.tensor([[13 - t, t] for t in range(7)], dtype=torch.int32, device=device)
    q, scale = dsa.scatter_cast_to_fp8(x, places)
    back = q.double() * scale.double().repeat_interleave(128, -1)
    expected = torch.cat((x, x.flip(0))).double()
    check_rounded("scattered x", back, expected, abs_tol=1e-2, rel_tol=2**-4, cos_tol=1e-3)


def rotary_cast_to_fp8(device: str) -> None:
    """Two groups of two heads: a group's tokens together."""
    x, angles = torch.randn(5, 4, 128, device=device).bfloat16(), torch.randn(5, 32, device=device)
    q, scale = dsa.rotary_cast_to_fp8(x, angles.cos(), angles.sin(), 2)
    back = q.double() * scale.double().repeat_interleave(128, -1)
    turned = x.double()
    pair = torch.complex(turned[..., -64::2], turned[..., -63::2]) * torch.exp(1j * angles.double())[:, None]
    turned[..., -64:] = torch.view_as_real(pair).flatten(-2)
    expected = torch.cat((turned[:, :2].flatten(1), turned[:, 2:].flatten(1)))
    check_rounded("rotated x", back, expected, abs_tol=2e-2, rel_tol=2**-4, cos_tol=1e-3)


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


def fp8_fp4_gemm_nt(device: str) -> None:
    """FP4 weights of three experts, the second without rows; tokens in any order, with weights."""
    packed, scale, exponents, w = _fp4_weights(3, 136, 256, device)
    by_block = (part.unflatten(2, (2, 4)).amax((1, 3)) for part in (exponents[:, :128], exponents[:, 128:]))
    largest = torch.stack([*by_block], 1)
    block_scale = dsa.fp4_block_scales(packed, scale)
    check_same("block scales", block_scale.double(), torch.exp2(largest.double() - 6))
    q, s = dsa.widen_fp4(packed, scale)
    wide = s.double().repeat_interleave(128, 1)[:, :136].repeat_interleave(128, 2)
    check_same("widened w", q.double() * wide, w)
    a = dsa.per_token_cast_to_fp8(torch.randn(5, 256, device=device))
    rows, ends = (torch.tensor(x, dtype=torch.int32, device=device) for x in ((4, 0, 0, 2), (1, 1, 4)))
    weights = torch.rand(4, device=device) + 0.5
    x = (a[0].double() * a[1].double().repeat_interleave(128, 1))[rows.long()] * weights.double()[:, None]
    expected, size = (torch.cat((y[:1] @ v[0].T, y[1:] @ v[2].T)) for y, v in ((x, w), (x.square(), w.square())))
    got = dsa.grouped_fp8_fp4_gemm_nt(a, (packed, scale, s), ends, torch.float32, rows=rows, weights=weights)
    check_product("y", got, expected, size.sqrt())


def grouped_fp8_gemm_swiglu(device: str) -> None:
    """With a limit that many exceed, and without; then FP4 weights."""
    packed, scale, _, w = _fp4_weights(2, 256, 256, device)
    q, s = dsa.widen_fp4(packed, scale)
    a = dsa.per_token_cast_to_fp8(3 * torch.randn(100, 256, device=device))
    rows = torch.randint(100, (200,), dtype=torch.int32, device=device)
    ends = torch.tensor((72, 200), dtype=torch.int32, device=device)
    x = (a[0].double() * a[1].double().repeat_interleave(128, 1))[rows.long()]
    gate, up = torch.cat((x[:72] @ w[0].T, x[72:] @ w[1].T)).chunk(2, -1)
    for limit in (None, 1.0):
        g, u = (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))
        expected, tolerance = g / (1 + (-g).exp()) * u, {"abs_tol": 0.12, "rel_tol": 0.075, "cos_tol": 2e-3}
        # One after the other: wrong scales of blocks, which the products of FP8 weights show, are refused with FP4's.
        for name, op, b in (
            ("h", dsa.grouped_fp8_gemm_swiglu, (q, s)),
            ("h of FP4 weights", dsa.grouped_fp8_fp4_gemm_swiglu, (packed, scale, s)),
        ):
            values, scales = op(a, b, ends, rows=rows, limit=limit)
            got = values.double() * scales.double()
            if limit is None:
                check_rounded(name, got, expected, **tolerance)
            else:  # many numbers are the limit, and all of these are rounded alike
                assert_close(f"limited {name}", got, expected, **tolerance)


def linear_fp32(device: str) -> None:
    """Of tiles that are a cluster each, and of such that are a CTA each."""
    for tokens, rows, channels in ((5, 72, 352), (33, 600, 2080)):
        x, w = torch.randn(tokens, channels, device=device), torch.randn(rows, channels, device=device)
        x, w = x.bfloat16(), w.bfloat16()
        expected, size = x.double() @ w.double().T, (x.double().square() @ w.double().square().T).sqrt()
        scales = torch.where(torch.arange(rows, device=device) >= 40, 0.3, 1.0).double()
        got = dsa.linear_fp32(x, w, 0.3, scaled_from=40)
        check_product("y", got, expected * scales, size * scales)


def _fp4_weights(experts: int, rows: int, columns: int, device: str) -> tuple[torch.Tensor, ...]:
    """(packed, scale, the scales' exponents, the weights in float64), of about columns^-0.5."""
    codes = torch.randint(16, (experts, rows, columns), device=device)
    exponents = torch.randint(-7, -4, (experts, rows, columns // 32), device=device)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.double, device=device)
    w = torch.cat((values, -values))[codes] * torch.exp2(exponents.double()).repeat_interleave(32, -1)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return packed, (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu), exponents, w
