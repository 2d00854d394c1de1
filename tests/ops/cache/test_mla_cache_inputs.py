"""The bridge of attention's cached inputs, on the CPU: when nothing is launched."""

import torch

import dsa


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


def test_nothing_to_do_is_not_launched(launches):
    dsa.write_mla_cache(*case(tokens=0))
    dsa.write_mla_cache(*case(pages=0))
    assert launches == []
    arguments = case(pages=0)
    dsa.write_mla_cache(*arguments, out=torch.empty_like(arguments[0]))
    assert len(launches) == 1
