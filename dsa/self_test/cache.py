"""What is written to caches."""

import torch

import dsa
from dsa.self_test.comparisons import D, check_rounded, hadamard
from dsa.testing import assert_close


def mla_cache_inputs(device: str) -> None:
    """V3.2: norm of the latent, rope on the 64 channels behind it, floats; V4: both on the same 512, to FP8."""
    angles, gain = torch.randn(40, 32, device=device), torch.randn(512, device=device)
    slots = torch.arange(40, device=device) + 50
    v4 = dsa.make_v4_cache(3, 64, device).fill_(0xFF)
    for cache in (torch.full((3, 64, 1, D), torch.nan, dtype=torch.bfloat16, device=device), v4):
        kv = torch.randn(40, 512 if cache is v4 else D, device=device).bfloat16()
        out = torch.full_like(kv, torch.nan)
        dsa.write_mla_cache(kv, gain, angles.cos(), angles.sin(), cache, slots, out=out)
        x = kv.double()
        x[:, :512] *= gain.double() / (x[:, :512].square().mean(1, keepdim=True) + 1e-6).sqrt()
        pair = torch.complex(x[:, -64::2], x[:, -63::2]) * torch.exp(1j * angles.double())
        x[:, -64:] = torch.view_as_real(pair).flatten(1)
        assert_close("out", out, x, abs_tol=4e-2, rel_tol=2**-7, cos_tol=1e-5)
        back = dsa.read_kv_cache(cache, slots)
        if cache is v4:
            check_rounded("FP8 cache", back, x, abs_tol=6e-2, rel_tol=0.075, cos_tol=2e-3)
        else:
            assert_close("cache", back, x, abs_tol=4e-2, rel_tol=2**-7, cos_tol=1e-5)


def compressed_kv(device: str) -> None:
    """Overlapping blocks of 4 in two passes, the second of which needs what the first left, to floats and to bytes."""
    for d, kind in ((512, "floats"), (128, "bytes")):
        kv, gate = torch.randn(2, 42, 2 * d, device=device)
        ape, gain, angles = torch.randn(4, 2 * d, device=device), torch.rand(d, device=device), torch.randn(42, 32)
        cos, sin = angles.cos().to(device), angles.sin().to(device)
        if kind == "floats":
            cache = torch.full((1, 64, 1, d), torch.nan, dtype=torch.bfloat16, device=device)
        else:
            cache = torch.full((1, 64, 1, d + 4), 0xFF, dtype=torch.uint8, device=device)
        slots = torch.full((42,), -1, device=device)
        slots[3::4] = torch.arange(10, device=device)
        state, state_slots = torch.full((1, 8, 2, 2 * d), torch.nan, device=device), torch.zeros(1, dtype=torch.int32)
        for low, high in ((0, 27), (27, 42)):
            ends, start = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, high - low], [low]))
            part = (x[low:high] for x in (kv, gate))
            turn = (x[low:high] for x in (cos, sin))
            where = (cache, slots[low:high], ends, start, state, state_slots.to(device))
            dsa.write_compressed_kv(*part, ape, gain, *turn, *where, overlap=True)
        k, z = (x[:40].double().unflatten(0, (10, 4)) for x in (kv, gate))
        z = z + ape.double()
        before = [torch.cat((x[:1] * 0 + pad, x[:-1]))[..., :d] for x, pad in ((k, 0), (z, -torch.inf))]
        k, z = (torch.cat((a, b[..., d:]), 1) for a, b in zip(before, (k, z)))
        x = (z.softmax(1) * k).sum(1)
        ends, start = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 42], [0]))
        entries, tokens = dsa.compress_kv(kv, gate, ape, ends, start, overlap=True)
        assert_close("entries", entries, x, abs_tol=1e-5, rel_tol=1e-4)
        if tokens.tolist() != list(range(3, 42, 4)):
            raise AssertionError("not the tokens that end their blocks")
        x *= gain.double() / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()
        pair = torch.complex(x[:, -64::2], x[:, -63::2]) * torch.exp(1j * angles[3::4].double().to(device))
        x[:, -64:] = torch.view_as_real(pair).flatten(1)
        if kind == "floats":
            assert_close("entries", cache[0, :10, 0], x, abs_tol=1e-3, rel_tol=2**-7, cos_tol=1e-5)
        else:
            x = x.cpu() @ hadamard()
            values, scales = cache.flatten().split((64 * d, 64 * 4))
            back = values.view(torch.float8_e4m3fn).view(64, d).double() * scales.view(torch.float32)[:, None]
            back = back[:10].cpu()
            check_rounded("FP8 entries", back, x, abs_tol=6e-2, rel_tol=0.075, cos_tol=2e-3)
