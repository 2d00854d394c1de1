"""Attention's cached inputs in one kernel: the rows against the reference on the CPU, the cache bit for bit against the
rows through `write_kv_cache`, and what is kept beside a cache of bytes against what it then gives back."""

import pytest
import torch

import dsa
from dsa.reference.cache import mla_cache_inputs as reference
from dsa.testing import calc_diff, poison_free_memory, poisoned
from tests.gpu.cache.poisoned_caches import poisoned_cache, random_slots, with_slots_outside
from tests.gpu.op_checks import assert_compiles, assert_runs_have_the_same_bits, assert_same_bits, captured, far_apart

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
# The cache's layout and d.
CACHES = [*((name, d) for name in ("bfloat16", "float16", "float32") for d in (576, 512)), ("v32", 576), ("v4", 512)]
SOME = [("bfloat16", 576), ("float16", 512), *CACHES[-2:]]


def case(tokens, d=576, dtype=torch.bfloat16):
    """kv, norm_weight, cos, sin; rows of different sizes, about the root of eps among them."""
    sizes = torch.exp2(torch.randint(-12, 8, (tokens, 1), device="cuda").float())
    angles = 10 * torch.randn(tokens, 32, device="cuda")
    kv = (torch.randn(tokens, d, device="cuda") * sizes).to(dtype)
    return kv, 1 + torch.randn(512, device="cuda"), angles.cos(), angles.sin()


def unrounded(kv, *inputs, **options):
    """The rows that a cache gets: what is kept beside one of floats, here one without pages."""
    out, cache = torch.full_like(kv, torch.nan), poisoned_cache("float32", kv.shape[1], 1)[:0]
    dsa.write_mla_cache(kv, *inputs, cache, torch.zeros(len(kv), dtype=torch.int64, device="cuda"), **options, out=out)
    return out


def as_kept(rows, layout, use_ue8m0=True):
    """What is kept of these rows beside a cache of that layout."""
    if layout not in ("v32", "v4"):
        return rows
    pages, every = poisoned_cache(layout, rows.shape[1], len(rows) // 64 + 1), torch.arange(len(rows), device="cuda")
    dsa.write_kv_cache(rows, pages, every, use_ue8m0)
    return dsa.read_kv_cache(pages, every, dtype=rows.dtype)


def rows_on_cpu(kv, *inputs, **options):
    """The same as `unrounded`."""
    out, cache = torch.empty(kv.shape, dtype=kv.dtype), torch.zeros(1, 1, 1, kv.shape[1])
    slots = torch.full((len(kv),), -1)
    reference.write_mla_cache(kv.cpu(), *(x.cpu() for x in inputs), cache, slots, **options, out=out)
    return out.cuda()


def assert_rows(got, expected):
    """Where the sum's order tips a rounding, a value is a step off: rare. What the norm leaves alone is the same."""
    still = expected.shape[1] == 576
    if still:
        assert_same_bits(got[:, 512:], expected[:, 512:])
    if got.dtype != torch.float32:
        assert (got != expected).sum() <= 4 + 2e-3 * got.numel()
    g, e = got.double(), expected.double()
    size = e.abs()
    if not still:  # rope adds up products, of which one may be a step off
        size[:, 448:] = size[:, 448:].unflatten(1, (-1, 64)).amax(2, keepdim=True).expand(-1, -1, 64).flatten(1)
    info = torch.finfo(got.dtype)
    assert ((g - e).abs() <= 4 * info.eps * (size + info.smallest_normal)).all()
    return calc_diff(got, expected)


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("layout", "d"), CACHES)
def test_write(layout, d, dtype, interleaved, use_ue8m0, record_error):
    if layout == "v4" and not use_ue8m0:
        return
    cache, separate, inputs = poisoned_cache(layout, d), poisoned_cache(layout, d), case(501, d, dtype)
    slots, skipped = with_slots_outside(random_slots(cache, 501), 9 * 64, torch.int64)
    options = {"eps": 1e-5, "interleaved": interleaved}
    poison_free_memory(mebibytes=16)
    out = torch.full_like(inputs[0], torch.nan)
    dsa.write_mla_cache(*inputs, cache, slots, **options, use_ue8m0=use_ue8m0, out=out)
    rows = unrounded(*inputs, **options)
    diff = assert_rows(rows, rows_on_cpu(*inputs, **options))
    record_error(diff)
    assert diff < 1e-6
    dsa.write_kv_cache(rows, separate, skipped, use_ue8m0)
    assert_same_bits((cache, out), (separate, as_kept(rows, layout, use_ue8m0)))
    written = skipped >= 0
    if layout in ("v32", "v4"):
        assert_same_bits(out[written], dsa.read_kv_cache(cache, slots[written], dtype=dtype))
    if layout == "v4":
        padding = torch.as_strided(cache, (9, cache.stride(0)), (cache.stride(0), 1))[:, 64 * 584 :]
        assert padding.numel() and padding.eq(0xFF).all()
    # Without `out` the cache gets the same.
    again, (slots, _) = poisoned_cache(layout, d), with_slots_outside(skipped, 9 * 64, torch.int32)
    dsa.write_mla_cache(*inputs, again, slots, **options, use_ue8m0=use_ue8m0)
    assert_same_bits(again, cache)


@pytest.mark.parametrize(
    ("layout", "d", "page_size", "tokens"),
    [
        *((*kind, page_size, 100) for kind in SOME for page_size in (1, 3, 7, 1000)),
        *((*kind, 64, tokens) for kind in SOME for tokens in (0, 1, 3, 4, 5, 33, 5000)),
    ],
)
def test_page_sizes_and_counts(layout, d, page_size, tokens):
    cache, separate = (poisoned_cache(layout, d, 2 + tokens // page_size, page_size) for _ in range(2))
    inputs, slots = case(tokens, d), random_slots(cache, tokens)
    out, rows = torch.full_like(inputs[0], torch.nan), unrounded(*inputs)
    dsa.write_mla_cache(*inputs, cache, slots, out=out)
    assert_rows(rows, rows_on_cpu(*inputs))
    dsa.write_kv_cache(rows, separate, slots)
    assert_same_bits((cache, out), (separate, as_kept(rows, layout)))


def test_strided_inputs():
    """The latent projection beside others, angles in any strides, rows into a wider tensor."""
    kv, gain, cos, sin = case(20)
    wide, wide_out = torch.randn(20, 3 * 576, device="cuda").bfloat16(), poisoned((20, 1152), torch.bfloat16, "cuda")
    wide[:, 576:1152] = kv
    cache, expected = poisoned_cache("v32", 576), poisoned_cache("v32", 576)
    slots = random_slots(cache, 20)
    out = torch.empty_like(kv)
    dsa.write_mla_cache(kv, gain, cos, sin, expected, slots, out=out)
    angles = torch.stack((cos, sin), 2)  # strides of 2
    arguments = wide[:, 576:1152], gain, angles[..., 0], sin.T.contiguous().T
    dsa.write_mla_cache(*arguments, cache, slots, out=wide_out[:, 576:])
    assert_same_bits((cache, wide_out[:, 576:]), (expected, out))
    assert wide_out[:, :576].isnan().all()
    one = kv[:1].as_strided((1, 576), (7, 1))
    dsa.write_mla_cache(one, gain, cos[:1], sin[:1], cache.fill_(0xFF), slots[:1])
    assert_same_bits(dsa.read_kv_cache(cache, slots[:1]), dsa.read_kv_cache(expected, slots[:1]))


@pytest.mark.parametrize(("layout", "d"), CACHES[4:])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_no_number(dtype, layout, d):
    kv, *inputs = case(8, d, dtype)
    kv[1, 2], kv[2, 300], kv[3, 447], kv[4], kv[5, -1], kv[6, -2] = (
        *(torch.nan, torch.inf, -torch.inf),
        *(0.0, torch.nan, torch.inf),
    )
    out, cache, rows = torch.empty_like(kv), poisoned_cache(layout, d), unrounded(kv, *inputs)
    dsa.write_mla_cache(kv, *inputs, cache, torch.arange(8, device="cuda"), out=out)
    for got, expected in ((rows, rows_on_cpu(kv, *inputs)), (out, as_kept(rows, layout))):
        assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())
        assert_rows(got.nan_to_num(7, 7, 7), expected.nan_to_num(7, 7, 7))


@pytest.mark.parametrize(("layout", "d"), [("bfloat16", 512), ("v32", 576), ("v4", 512)])
def test_pages_far_apart(layout, d):
    near, inputs = poisoned_cache(layout, d), case(300, d)
    far, slots = far_apart(near), random_slots(near, 300)
    for cache in (far, near):
        dsa.write_mla_cache(*inputs, cache, slots)
    assert_same_bits(far, near)


@pytest.mark.parametrize(("layout", "d"), [("bfloat16", 576), ("v32", 576), ("v4", 512)])
def test_repeated_runs_graph_replay_and_torch_compile(layout, d):
    cache, inputs = poisoned_cache(layout, d), case(64, d)
    slots = random_slots(cache, 64)

    def run():
        cache.fill_(torch.nan if cache.is_floating_point() else 0xFF)
        out = torch.empty_like(inputs[0])
        dsa.write_mla_cache(*inputs, cache, slots, out=out)
        return out, cache.clone()

    assert_runs_have_the_same_bits(run)
    (graph, replayed), before = captured(run), run()
    inputs[0].normal_()
    slots.copy_(slots.roll(3))
    graph.replay()
    assert_same_bits(replayed, run())
    assert not torch.equal(replayed[0], before[0])
    assert_compiles(run)
