"""Norm, rotation, SwiGLU, hyper connections."""

import torch

import dsa
from dsa.testing import assert_close


def rms_norm(device: str) -> None:
    x, weight = 3 * torch.randn(40, 2, 1536, device=device).bfloat16(), torch.randn(1536, device=device)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-2).sqrt()
    assert_close("y", dsa.rms_norm(x, None, 1e-2), expected, abs_tol=1e-6, rel_tol=2**-7, cos_tol=5e-6)
    assert_close(
        "y", dsa.rms_norm(x, weight, 1e-2), expected * weight.double(), abs_tol=1e-6, rel_tol=2**-7, cos_tol=5e-6
    )


def rms_norm_rotary(device: str) -> None:
    x, angles = torch.randn(40, 3, 512, device=device).bfloat16(), torch.randn(40, 32, device=device)
    y = dsa.rms_norm_rotary(x, None, angles.cos(), angles.sin(), 1e-2)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-2).sqrt()
    pair = torch.complex(expected[..., -64::2], expected[..., -63::2]) * torch.exp(1j * angles.double())[:, None]
    expected[..., -64:] = torch.view_as_real(pair).flatten(-2)
    assert_close("y", y, expected, abs_tol=3e-2, rel_tol=2**-7, cos_tol=1e-5)


def rms_norm_cast(device: str) -> None:
    """Of a sum and of x alone. A scale is the largest value / 448, or less than twice that; a byte is off by at most a
    16th of its value or a 512th of its scale."""
    x, residual = (torch.randn(9, 640, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(640, device=device)
    total, *added = dsa.add_rms_norm_cast_to_fp8(x, residual, weight, 1e-2)
    assert_close("total", total, residual.double() + x.double(), abs_tol=1e-6, rel_tol=2**-8, cos_tol=5e-6)
    alone = dsa.rms_norm_cast_to_fp8(x, weight, 1e-2, use_ue8m0=False)
    for (y, q, scale), h, above in ((added, total, 2.0), (alone, x, 1.0001)):
        expected = h.double() / (h.double().square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight.double()
        assert_close("y", y, expected, abs_tol=1e-6, rel_tol=2**-7, cos_tol=5e-6)
        y, step = y.double().unflatten(1, (5, 128)), scale.double()[..., None]
        ratio = 448 * scale.double() / y.abs().amax(-1)
        assert (ratio > 0.9999).all() and (ratio < above).all()
        off = (q.double().unflatten(1, (5, 128)) * step - y).abs()
        assert (off <= y.abs() / 16 + step / 512).all()


def rotary(device: str) -> None:
    """Neighbours and halves, first and last; and the same in place, in a part of a wider tensor."""
    x, angles = torch.randn(9, 3, 96, device=device).bfloat16(), torch.randn(9, 32, device=device)
    turn = torch.exp(1j * angles.double().cpu())[:, None]
    for interleaved, dims in ((True, "first"), (True, "last"), (False, "first"), (False, "last")):
        begin = 32 if dims == "last" else 0
        expected = x.double().cpu()
        part = expected[..., begin : begin + 64]
        pair = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        turned = torch.complex(*(p.contiguous() for p in pair)) * turn
        expected[..., begin : begin + 64] = (
            torch.view_as_real(turned).flatten(-2) if interleaved else torch.cat((turned.real, turned.imag), -1)
        )
        kind = {"interleaved": interleaved, "dims": dims}
        wide = torch.nn.functional.pad(x, (0, 32))
        part = wide[..., :96]
        new = dsa.apply_rotary(x, angles.cos(), angles.sin(), **kind)
        dsa.apply_rotary(part, angles.cos(), angles.sin(), **kind, out=part)
        for name, got in (("rotated", new), ("rotated in place", part)):
            assert_close(name, got.cpu(), expected, abs_tol=1e-6, rel_tol=2**-7, cos_tol=5e-6)


def hyper_connections(device: str) -> None:
    """Four streams of three tokens, and what a sublayer gives back; Sinkhorn in float64, as the definition has it."""
    streams, y = (torch.randn(s, device=device).bfloat16() for s in ((3, 4, 264), (3, 264)))
    mix, base, scale = torch.randn(3, 24, device=device), torch.randn(24, device=device), torch.rand(3, device=device)
    x, post, comb = dsa.hyper_collapse(streams, mix, base, scale)
    v = streams.double()
    z = mix.double() / (v.square().mean((1, 2)) + 1e-6).sqrt()[:, None]
    z = z * scale.double().repeat_interleave(torch.tensor((4, 4, 16), device=device)) + base.double()
    pre, given = 1 / (1 + (-z[:, :4]).exp()) + 1e-6, 2 / (1 + (-z[:, 4:8]).exp())
    weights = z[:, 8:].view(3, 4, 4).softmax(2) + 1e-6
    for step in range(39):
        weights = weights / (weights.sum(1 + step % 2, keepdim=True) + 1e-6)
    assert_close("x", x, (pre[..., None] * v).sum(1), abs_tol=1e-3, rel_tol=2**-8, cos_tol=1e-5)
    assert_close("post", post, given, abs_tol=1e-5, rel_tol=1e-4)
    assert_close("comb", comb, weights, abs_tol=1e-5, rel_tol=1e-4)
    expected = post.double()[..., None] * y.double()[:, None] + comb.double().transpose(1, 2) @ v
    assert_close(
        "streams", dsa.hyper_expand(y, streams, post, comb), expected, abs_tol=1e-3, rel_tol=2**-8, cos_tol=1e-5
    )
    z = mix[:, :4].double() / (v.square().mean((1, 2)) + 1e-6).sqrt()[:, None] * scale[0].double() + base[:4].double()
    expected = ((1 / (1 + (-z).exp()) + 1e-6)[..., None] * v).sum(1)
    head = dsa.hyper_head(streams, mix[:, :4].contiguous(), base[:4], scale[:1])
    assert_close("head", head, expected, abs_tol=1e-3, rel_tol=2**-8, cos_tol=1e-5)


def hyper_mix(device: str) -> None:
    """24 outputs, and 4 of streams that are no whole number of blocks; many and few tokens."""
    for tokens, n, channels, count in ((1700, 4, 128, 24), (300, 4, 128, 24), (3, 2, 264, 4)):
        streams = torch.randn(tokens, n, channels, device=device).bfloat16()
        parts = torch.randn(3, count, n * channels, device=device).bfloat16()
        parts *= torch.tensor([1, 2**-8, 2**-16], device=device)[:, None, None]
        mix = dsa.hyper_mix(streams, parts)
        v, weight = streams.flatten(1).double(), parts.double().sum(0)
        allowed = 1e-5 * (v.abs() @ weight.abs().T)
        assert ((mix - v @ weight.T).abs() <= allowed).all()


def hyper_collapse_norm_cast(device: str) -> None:
    """The norm of the collapse in float64, and its cast: a scale is the largest value / 448, or less than twice that; a
    byte is off by at most a 16th of its value or a 512th of its scale."""
    streams, weight = torch.randn(3, 4, 384, device=device).bfloat16(), torch.randn(384, device=device)
    mix, base, scale = torch.randn(3, 24, device=device), torch.randn(24, device=device), torch.rand(3, device=device)
    y, q, q_scale, post, comb = dsa.hyper_collapse_norm_cast_to_fp8(streams, mix, base, scale, weight, norm_eps=1e-2)
    v = streams.double()
    z = mix.double() / (v.square().mean((1, 2)) + 1e-6).sqrt()[:, None]
    z = z * scale.double().repeat_interleave(torch.tensor((4, 4, 16), device=device)) + base.double()
    x = ((1 / (1 + (-z[:, :4]).exp()) + 1e-6)[..., None] * v).sum(1).bfloat16().double()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight.double()
    assert_close("y", y, expected, abs_tol=1e-3, rel_tol=2**-6, cos_tol=2e-5)
    assert_close("post", post, 2 / (1 + (-z[:, 4:8]).exp()), abs_tol=1e-5, rel_tol=1e-4)
    assert_close("columns of comb", comb.sum(1), torch.ones_like(post).double(), abs_tol=1e-4, rel_tol=1e-4)
    y, step = y.double().unflatten(1, (3, 128)), q_scale.double()[..., None]
    ratio = 448 * q_scale.double() / y.abs().amax(-1)
    assert (ratio > 0.9999).all() and (ratio < 2.0).all()
    off = (q.double().unflatten(1, (3, 128)) * step - y).abs()
    assert (off <= y.abs() / 16 + step / 512).all()


def hyper_expand_mix(device: str) -> None:
    """Of few tokens, which have a kernel, and of more; a last block of 64 channels that is not whole."""
    for tokens, channels in ((1, 128), (5, 264), (40, 128)):
        y, streams = (torch.randn(tokens, *s, channels, device=device).bfloat16() for s in ((), (4,)))
        post, comb = (torch.rand(tokens, *s, device=device) for s in ((4,), (4, 4)))
        parts = torch.randn(3, 24, 4 * channels, device=device).bfloat16()
        parts *= torch.tensor([1, 2**-8, 2**-16], device=device)[:, None, None]
        new, mix = dsa.hyper_expand_mix(y, streams, post, comb, parts)
        expected = post.double()[..., None] * y.double()[:, None] + comb.double().transpose(1, 2) @ streams.double()
        assert_close("streams", new, expected, abs_tol=1e-3, rel_tol=2**-8, cos_tol=1e-5)
        v, weight = new.flatten(1).double(), parts.double().sum(0)
        assert ((mix - v @ weight.T).abs() <= 1e-5 * (v.abs() @ weight.abs().T)).all()
