"""The bridge of attention's cached inputs, on the CPU: dispatch, torch.compile, and errors that name the argument."""

import pytest
import torch

import dsa
from dsa.ops.cache import mla_cache_inputs as op  # noqa: F401 -- `launches` looks at it
from dsa.reference.cache import mla_cache_inputs as reference

WRITE = torch.ops.dsa.write_mla_cache
NAMES = ("kv", "norm_weight", "cos", "sin", "cache", "slots")
OPTIONS = [{}, {"eps": 0.5, "interleaved": False, "use_ue8m0": False}]
DEFAULTS = (1e-6, True, True)


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


def to_meta(arguments):
    return [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]


def same_bits(got, expected):
    return torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("d", [576, 512])
def test_the_reference_runs_without_a_gpu(d, options):
    *inputs, cache, slots = case(d=d)
    poison, expected, expected_out = cache.clone(), cache.clone(), torch.empty_like(inputs[0])
    reference.write_mla_cache(*inputs, expected, slots, **options, out=expected_out)
    out = torch.full_like(inputs[0], torch.nan)
    assert dsa.write_mla_cache(*inputs, cache, slots, **options, out=out) is None
    assert same_bits(cache, expected) and same_bits(out, expected_out) and not same_bits(cache, poison)
    cache.copy_(poison)
    dsa.write_mla_cache(*inputs, cache, slots, **options)
    assert same_bits(cache, expected)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_compiled_graph_sees_what_it_wrote(options, keep):
    *inputs, cache, slots = case()

    def write(*arguments):
        before = arguments[4].clone()
        out = torch.full_like(arguments[0], torch.nan) if keep else None
        dsa.write_mla_cache(*arguments, **options, out=out)
        return before, arguments[4].clone(), out

    poison, expected, expected_out = cache.clone(), cache.clone(), torch.empty_like(inputs[0])
    dsa.write_mla_cache(*inputs, expected, slots, **options, out=expected_out)
    before, after, out = torch.compile(write, fullgraph=True, backend="aot_eager")(*inputs, cache, slots)
    assert torch.equal(before, poison) and torch.equal(after, expected) and torch.equal(cache, expected)
    assert same_bits(out, expected_out) if keep else out is None


def test_registration():
    for d in (576, 512):
        arguments = case(d=d)
        arguments[4].zero_()
        torch.library.opcheck(WRITE.default, (*arguments, *DEFAULTS, None))
        torch.library.opcheck(WRITE.default, (*arguments, *DEFAULTS, torch.zeros_like(arguments[0])))


def test_fake_calls_check_their_arguments():
    arguments = to_meta(case())
    assert WRITE(*arguments, *DEFAULTS, None) is None
    with pytest.raises(ValueError, match=r"out: shape must be \[5, 576\], got \[4, 576\]"):
        WRITE(*arguments, *DEFAULTS, arguments[0][:4])
    arguments[1] = arguments[1].bfloat16()
    with pytest.raises(ValueError, match="norm_weight: dtype must be float32, got bfloat16"):
        WRITE(*arguments, *DEFAULTS, None)


def test_forcing_the_kernel_on_the_cpu_is_an_error():
    with dsa.use_backend("cute"), pytest.raises(ValueError, match="write_mla_cache: backend 'cute' was asked for, but"):
        dsa.write_mla_cache(*case())


def test_what_is_no_tensor_is_named():
    for i, name in enumerate(NAMES):
        arguments = case()
        arguments[i] = [1.0]
        with pytest.raises(TypeError, match=rf"{name}: must be a torch\.Tensor, got list"):
            dsa.write_mla_cache(*arguments)


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


def test_what_the_kernel_does_not_take(launches):
    good = dict(zip(NAMES, case()))
    for changes, message in [
        ({"kv": torch.randn(5, 577)[:, :576]}, "kv: rows must start at multiples of 16 bytes"),
        ({"norm_weight": torch.rand(513)[1:]}, "norm_weight: rows must start at multiples of 16 bytes"),
        ({"norm_weight": torch.rand(1024)[::2]}, "norm_weight: the last dimension must be contiguous"),
        (
            {"norm_weight": torch.rand(576)},
            r"norm_weight: the kernel takes N 512 of d \(576, 512\) .* 576 of 576",
        ),
        (
            {"kv": torch.randn(5, 520), "cache": torch.zeros(3, 4, 1, 520)},
            r"norm_weight: the kernel takes N 512 of d \(576, 512\) channels, got 512 of 520",
        ),
        (
            {"cos": torch.zeros(5, 16), "sin": torch.zeros(5, 16)},
            "cos: the kernel rotates R 64 channels, got 32",
        ),
        ({"sin": good["sin"].to("meta")}, "sin: must be on cache's device cpu, got meta"),
        ({"slots": torch.arange(10)[::2]}, r"slots: must be contiguous, got strides \[2\]"),
        ({"cache": torch.zeros(3, 4, 1, 660).byte()[..., :656]}, "cache: rows must start at multiples of 16 bytes"),
        ({"out": torch.empty(5, 580).bfloat16()[:, :576]}, "out: rows must start at multiples of 16 bytes"),
        ({"out": good["kv"].to("meta")}, "out: must be on cache's device cpu, got meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            dsa.write_mla_cache(**{**good, **changes})
    assert launches == []
