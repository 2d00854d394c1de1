"""The bridge of attention's cached inputs, on the CPU: dispatch, torch.compile, and errors that name the argument."""

import torch

import dsa
from dsa.ops.cache import mla_cache_inputs as op  # noqa: F401 -- `launches` looks at it


def case(tokens=5, pages=3, d=576):
    """All positional arguments; the cache is V3.2's bytes or, for 512 channels, bf16, of NaN."""
    angles = torch.randn(tokens, 32)
    if d == 576:
        cache = torch.full((pages, 4, 1, 656), 0xFF, dtype=torch.uint8)
    else:
        cache = torch.full((pages, 4, 1, d), torch.nan, dtype=torch.bfloat16)
    slots = torch.randperm(12)[:tokens] if pages else torch.full((tokens,), -1)
    slots[:1] = -1
    return [torch.randn(tokens, d).bfloat16(), torch.rand(512), angles.cos(), angles.sin(), cache, slots]


def test_what_the_kernel_gets(launches):
    kv, weight, cos, sin, cache, slots = case()
    out = torch.empty(5, 1152, dtype=torch.bfloat16)[:, :576]
    dsa.write_mla_cache(kv, weight, cos, sin, cache, slots, eps=0.25, interleaved=False, out=out)
    dsa.write_mla_cache(kv, weight, cos.T.contiguous().T, sin, cache, slots.int(), use_ue8m0=False)
    dsa.write_mla_cache(*case(d=512))
    (variant, arguments), (plain_variant, plain), (float_variant, _) = launches
    assert variant == (torch.bfloat16, "v32", 576, False, True)
    assert plain_variant == (torch.bfloat16, "v32", 576, True, False)
    assert float_variant == (torch.bfloat16, "bfloat16", 512, True, False)
    assert all(x is y for x, y in zip(arguments, (kv, weight, cos, sin))) and arguments[6] is out
    pages, words = arguments[4:6]
    assert pages.shape == (3, 4, 656) and pages.stride() == (2624, 656, 1) and pages.data_ptr() == cache.data_ptr()
    assert torch.equal(words.view(torch.int64), slots) and torch.equal(plain[5], slots.int())
    assert arguments[7:] == (1, 0.25) and plain[7:] == (0, 1e-6)
    # Nothing is kept: the kernel gets kv in the place of out. Angles may have any strides.
    assert plain[6] is kv and plain[2].stride() == (1, 5)


def test_nothing_to_do_is_not_launched(launches):
    dsa.write_mla_cache(*case(tokens=0))
    dsa.write_mla_cache(*case(pages=0))
    assert launches == []
    arguments = case(pages=0)
    dsa.write_mla_cache(*arguments, out=torch.empty_like(arguments[0]))
    assert len(launches) == 1
