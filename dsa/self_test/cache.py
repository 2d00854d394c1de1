"""What is written to caches."""

import torch

import dsa
from dsa.self_test.comparisons import D, check_rounded, check_same, hadamard
from dsa.testing import assert_close


def indexer_cache(device: str) -> None:
    """Keys and scales, by the layout's definition and as they are read: bit by bit. Slot -1 is no slot."""
    k, scale = torch.randn(40, 128, device=device).to(torch.float8_e4m3fn), torch.rand(40, device=device)
    cache = torch.zeros(3, 64, 1, 132, dtype=torch.uint8, device=device)
    slots = torch.randperm(3 * 64, device=device)[:40]
    slots[7] = -1
    dsa.write_indexer_cache(k, scale, cache, slots)
    expected = torch.zeros(192, 128, device=device), torch.zeros(192, device=device)
    for whole, rows in zip(expected, (k.float(), scale)):
        whole[slots[slots >= 0]] = rows[slots >= 0]
    values, scales = cache.view(3, -1).split((64 * 128, 64 * 4), 1)
    written = values.reshape(192, 128).view(torch.float8_e4m3fn), scales.reshape(192, 4).view(torch.float32)[:, 0]
    every = torch.arange(-1, 192, device=device)
    read = dsa.read_indexer_cache(cache, every)
    given = tuple(torch.empty_like(x) for x in read)
    dsa.read_indexer_cache(cache, every, *given)
    for name, got, back, into, x in zip(("k", "k_scale"), written, read, given, expected):
        check_same(f"{name} that is written", got.float(), x)
        check_same(f"{name} that is read", back.float(), torch.cat((torch.zeros_like(x[:1]), x)))
        check_same(f"{name} that is given", into.float(), torch.cat((torch.zeros_like(x[:1]), x)))


def kv_cache(device: str) -> None:
    """Rows of floats as they are; of V3.2's and V4's bytes the 64 rope channels as they are, the others rounded. Slot
    -1 is no slot, and a new V4 cache has zeros."""
    slots = torch.randperm(3 * 64, device=device)[:40]
    slots[7] = -1
    at = slots[slots >= 0]
    for kind, d in (("bf16", D), ("v32", D), ("v4", 512)):
        width, dtype = (d, torch.bfloat16) if kind == "bf16" else (656, torch.uint8)
        cache = torch.zeros(3, 64, 1, width, dtype=dtype, device=device)
        if kind == "v4":
            cache = dsa.make_v4_cache(3, 64, device)
        kv = torch.randn(40, d, device=device).bfloat16()
        dsa.write_kv_cache(kv, cache, slots)
        expected = torch.zeros(192, d, device=device)
        expected[at] = kv.float()[slots >= 0]
        got = dsa.read_kv_cache(cache, torch.arange(-1, 192, device=device))
        check_same(f"{kind}, slot -1", got[:1], torch.zeros_like(got[:1]))
        exact = 0 if kind == "bf16" else d - 64
        check_same(kind, got[1:, exact:], expected[:, exact:])
        if exact:
            x, back = expected[at, :exact], got[1:][at, :exact]
            check_rounded(f"{kind} values", back, x, abs_tol=6e-2, rel_tol=0.075, cos_tol=2e-3)
            left = got[1:].index_fill(0, at, 0.0)
            check_same(f"{kind}, unwritten slots", left, torch.zeros_like(left))


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
        back = dsa.read_kv_cache(cache, slots, dtype=kv.dtype)
        check_same("out", out, back)
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
        state, found = torch.full((1, 8, 2, 2 * d), torch.nan, device=device), []
        for low, high in ((0, 27), (27, 42)):
            ends, start = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, high - low], [low]))
            part = (x[low:high] for x in (kv, gate))
            entries, tokens = dsa.compress_kv(*part, ape, ends, start, state, state_slots.to(device), overlap=True)
            if tokens.tolist() != [token - low for token in range(3, 42, 4) if low <= token < high]:
                raise AssertionError("not the tokens that end their blocks")
            found.append(entries)
        assert_close("entries", torch.cat(found), x, abs_tol=1e-5, rel_tol=1e-4)
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


def slot_mapping(device: str) -> None:
    """Two sequences with earlier tokens and one without tokens, and tokens of none: in pages, one of which is missing,
    of all tokens, of entries of two tokens, and of rings."""
    bounds, lengths = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 3, 3, 7], [5, 9, 6]))
    table = torch.tensor([[7, 2, -1], [0, 1, 3], [5, -1, 4]], dtype=torch.int32, device=device)
    expected = {
        "new tokens": ([30, 31, 8, 22, 23, -1, -1, -1], dsa.slot_mapping(table, bounds, lengths, 8, 4)),
        "all tokens": ([28, 29, 30, 20, 21, 22, 23, -1], dsa.slot_mapping(table, bounds, None, 8, 4)),
        "entries": ([-1, 15, -1, -1, 11, -1, -1, -1], dsa.slot_mapping(table, bounds, lengths, 8, 2, ratio=2)),
        "rings": ([-1, 15, 14, -1, -1, 10, 11, -1], dsa.slot_mapping(table[:, :1], bounds, lengths, 8, 2, ring=True)),
    }
    for name, (slots, got) in expected.items():
        if got.tolist() != slots:
            raise AssertionError(f"not the slots of {name}: {got.tolist()}")
