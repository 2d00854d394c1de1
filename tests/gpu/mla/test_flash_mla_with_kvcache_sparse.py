"""MLA decoding over selected keys on the GPU against the fp32 reference: every cache layout, one cache and two."""

import functools

import pytest
import torch

import dsa
from dsa.reference.cache import kv_cache
from dsa.reference.mla import flash_mla_with_kvcache as reference
from dsa.testing import assert_close, poison_free_memory
from tests.gpu.attention import (
    BF16,
    D_V,
    INF,
    NAN,
    SINKS,
    assert_attention,
    assert_writes_a_part,
    int32,
    no_keys,
    normal,
    spoiled,
)
from tests.gpu.mla.caches import (
    FEW_LAYOUTS,
    LAYOUTS,
    empty_cache,
    make_cache,
    unused_slots,
    v4_planes,
    with_gaps,
)
from tests.gpu.op_checks import (
    among_nan,
    assert_runs_have_the_same_bits,
    assert_runs_on_the_current_stream,
    assert_same_bits,
    assert_same_on_the_second_gpu,
    replays,
)

TOLERANCE = {"abs_tol": 1e-3, "rel_tol": 2.01 / 128, "cos_tol": 5e-6}
LSE_TOLERANCE = {"abs_tol": 1e-6, "rel_tol": 8.01 / 65536}
LISTS = "indices", "extra_k_cache", "extra_indices_in_kvcache"
BYTES = [name for name in LAYOUTS if "bytes" in name]


def size(cache):
    """Its slots."""
    return cache.shape[0] * cache.shape[1]


def pick(slots, cache, batch, s_q, k, invalid=0.0):
    """[batch, s_q, k] of the slots, without repetition where there are enough; that share of them no keys."""
    if k > len(slots):
        places = torch.randint(0, len(slots), (batch, s_q, k), device="cuda")
    else:
        places = torch.rand(batch * s_q, len(slots), device="cuda").argsort(1)[:, :k].view(batch, s_q, k)
    return spoiled(slots[places].int(), size(cache), invalid)


class Case:
    """Queries with random keys of a cache; with `extra` = (k, page) also of a second one of the same layout."""

    def __init__(
        self, layout="656 bytes", batch=2, s_q=1, heads=128, k=512, page=64, rows=3000, invalid=0.05, extra=None
    ):
        self.layout, (self.d, dtype) = layout, LAYOUTS[layout]
        self.q = normal(batch, s_q, heads, self.d, dtype=dtype)
        self.cache, self.slots = make_cache(layout, rows, page)
        self.options = {"indices": pick(self.slots, self.cache, batch, s_q, k, invalid)}
        if extra is not None:
            more, self.extra_slots = make_cache(layout, rows // 3, extra[1])
            self.options["extra_k_cache"] = more
            self.options["extra_indices_in_kvcache"] = pick(self.extra_slots, more, batch, s_q, extra[0], invalid)
        self.options["is_fp8_kvcache"] = "bytes" in layout

    def run(self, plan=None, splits=None, **options):
        q, cache = options.pop("q", self.q), options.pop("k_cache", self.cache)
        return dsa.flash_mla_with_kvcache(q, cache, None, None, D_V, plan, splits, **{**self.options, **options})

    def expected(self, **options):
        options.pop("enable_batch_invariant", None)
        options = {**self.options, **options}
        return reference.flash_mla_with_kvcache(self.q.float(), self.cache, None, None, D_V, None, **options)

    def check(self, record_error=None, got=None, plan=(None, None), **options):
        poison_free_memory(mebibytes=64)
        got = self.run(*plan, **options) if got is None else got
        assert got[0].dtype == self.q.dtype
        assert_attention(got, self.expected(**options), TOLERANCE, LSE_TOLERANCE, record_error)
        return got


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 80, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_heads(layout, heads, record_error):
    Case(layout, 3, 2, heads).check(record_error, attn_sink=torch.randn(heads, device="cuda"))


@pytest.mark.parametrize(
    ("batch", "s_q", "k"),
    [
        *((2, s_q, 300) for s_q in (1, 2, 3, 4, 5, 8)),
        *((3, 1, k) for k in (1, 3, 63, 64, 65, 127, 512, 1024, 2047, 2048)),
        *((batch, 1, 2048) for batch in (1, 2, 17, 128)),
    ],
)
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_queries_and_keys(layout, heads, batch, s_q, k, record_error):
    Case(layout, batch, s_q, heads, k).check(record_error)


@pytest.mark.parametrize("page", [1, 16, 48, 64, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages(layout, page, record_error):
    if layout == "584 bytes, unpadded" and page == 1:
        page = 2  # or pages would not start at multiples of 16 bytes
    Case(layout, 2, 1, 64, 500, page).check(record_error)
    Case(layout, 2, 1, 16, 200, page, extra=(100, 3 * page)).check(record_error)


@pytest.mark.parametrize(("layout", "heads"), [("656 bytes", 16), ("584 bytes", 64), ("fp16, 576", 8)])
def test_many_sequences(layout, heads, record_error):
    Case(layout, 4096, 1, heads, 70).check(record_error, topk_length=torch.arange(4096, device="cuda").int() % 80)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_splits(layout, heads, record_error):
    """One sequence or two with as many keys as keep every multiprocessor busy, evenly and not."""
    Case(layout, 1, 1, heads, 20_001, rows=25_000).check(record_error)
    case = Case(layout, 2, 1, heads, 9000, rows=10_000, extra=(5000, 64))
    case.check(record_error, topk_length=int32([9000, 40]), extra_topk_length=int32([3, 4000]))


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_no_keys_of_one_cache(layout, record_error):
    """No index, or no page: what is left is the other cache."""
    case = Case(layout, 3, 2, 64, 300, extra=(200, 16))
    first, second = case.options["indices"], case.options["extra_indices_in_kvcache"]
    case.check(record_error, indices=first[..., :0])
    case.check(record_error, extra_indices_in_kvcache=second[..., :0])
    case.check(record_error, extra_k_cache=case.options["extra_k_cache"][:0])
    out, lse = case.check(indices=first[..., :0], extra_indices_in_kvcache=second[..., :0])
    assert out.eq(0).all() and lse.eq(INF).all()
    case.cache = case.cache[:0]
    case.check(record_error)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_topk_length(layout, heads, record_error):
    """Also that keys behind it are not looked at: they are NaN."""
    values = [0, 1, 63, 64, 65, 500, 999, 1000, 1001, 2**31 - 1, -1, -(2**31)]
    case = Case(layout, len(values), 2, heads, 1000, extra=(130, 16))
    lengths, more = int32(values), int32(values).flip(0)
    for name, cache, slots, count in (
        ("indices", case.cache, case.slots, lengths),
        ("extra_indices_in_kvcache", case.options["extra_k_cache"], case.extra_slots, more),
    ):
        beyond = torch.arange(case.options[name].shape[2], device="cuda") >= count[:, None, None]
        case.options[name].masked_fill_(beyond, int(unused_slots(cache, slots)[0]))
    case.check(record_error, topk_length=lengths, extra_topk_length=more)


@pytest.mark.parametrize(
    ("k", "extra"), [(128, (512, 64)), (2048, (64, 16)), (65, (1, 2)), (1, (700, 48)), (640, (333, 6))]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_cache(layout, k, extra, record_error):
    case = Case(layout, 5, 2, 64, k, 256, extra=extra)
    sink = torch.randn(64, device="cuda")
    case.check(record_error)
    case.check(record_error, attn_sink=sink, topk_length=int32([0, 1, k, k // 2, 9]))
    lengths, more = int32([k, 0, 0, 5, 64]), int32([0, extra[0], 0, 3, 64])
    case.check(record_error, attn_sink=sink, topk_length=lengths, extra_topk_length=more)


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_sinks(layout, record_error):
    sink = torch.tensor(SINKS, device="cuda")
    case = Case(layout, 4, 2, 8)
    case.options["indices"][2] = -1
    out, lse = case.check(record_error, attn_sink=sink)
    plain, plain_lse = case.run()
    assert torch.equal(lse, plain_lse) and torch.equal(out[:, :, 0], plain[:, :, 0]) and not out[:, :, [1, 7]].any()
    # With splits, where the sink comes in once.
    Case(layout, 1, 1, 8, 6000, rows=7000).check(record_error, attn_sink=sink)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("invalid", [0.5, 0.98, 1.0])
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_indices_that_are_no_keys(layout, invalid, heads, record_error):
    case = Case(layout, 3, 2, heads, 1000, invalid=invalid, extra=(200, 16))
    case.options["indices"][1] = case.options["extra_indices_in_kvcache"][1] = -1
    case.options["indices"][2, 0] = 2**31 - 1
    out, lse = case.check(record_error)
    assert out[1].eq(0).all() and lse[1].eq(INF).all()


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_tiles_without_keys(layout, heads, record_error):
    """Keys in the last place only, in the first, in one tile of many, in every other tile, and in the second cache."""
    case = Case(layout, 8, 1, heads, 640, invalid=0.0, extra=(100, 16))
    place = torch.arange(640, device="cuda")
    tile = place // 64
    kept = [place == 639, place == 0, place == 320, tile == 9, tile == 0, tile == 5, tile % 2 == 0, place < 0]
    bad = no_keys(size(case.cache))[place % 6]
    case.options["indices"] = torch.where(torch.stack(kept)[:, None], case.options["indices"], bad)
    case.check(record_error)
    case.check(record_error, extra_topk_length=int32([0] * 8))


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_a_key_named_twice_counts_twice(layout, record_error):
    case = Case(layout, 3, 1, 64, 300, rows=40)
    case.options["indices"][0] = case.slots[0].int()
    case.check(record_error)


def assert_rounded_twice(out, expected):
    """To f16's 11 bits of a number in its range, within an eighth of a unit, and then to bf16's 8."""
    error = (out.double() - expected.double()).abs()
    assert (error <= expected.double().abs() * (2**-8 + 9 / 8 * 2**-11)).all()


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_key_gives_its_value_exactly(layout, heads):
    """Its first 512 numbers, in bytes e4m3 times the scale; a product that f16 does not have is rounded to it first."""
    case = Case(layout, 30, 1, heads, 1, invalid=0.0)
    for k, place in ((1, 0), (64, 63), (200, 131), (2000, 1999)):
        key = pick(case.slots, case.cache, 30, 1, 1)
        indices = no_keys(size(case.cache))[torch.randint(6, (30, 1, k), device="cuda")]
        indices[:, :, place] = key[:, :, 0]
        out, lse = case.run(indices=indices)
        rows = kv_cache.read_kv_cache(case.cache, key[:, 0, 0])
        expected = rows[:, None, None, :D_V].expand(-1, 1, heads, -1)
        if layout.endswith("any scales"):
            assert_rounded_twice(out, expected)
        else:
            assert torch.equal(out, expected.to(out.dtype))
        logits = torch.einsum("bhd,bd->bh", case.q[:, 0].double(), rows.double()) * case.d**-0.5
        assert_close("lse", lse[..., 0], logits, **LSE_TOLERANCE, cos_tol=1e-5)


@pytest.mark.parametrize("layout", BYTES)
def test_bytes_of_every_value(layout):
    """All e4m3 numbers but NaN, and scales of every size, exactly."""
    cache, slots = make_cache(layout, 254, 64)
    bytes_ = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8, device="cuda")
    number = torch.arange(254, device="cuda")
    exponent, values = number // 4, bytes_[(torch.arange(D_V, device="cuda") - number[:, None]) % 254]
    if "656" in layout:
        rows = cache.view(-1, 656)
        rows[slots, :512] = values
        scale = torch.exp2(exponent.float() - 40)[:, None].repeat(1, 4)
        if layout.endswith("any scales"):
            scale *= 1 + torch.rand(254, 4, device="cuda")
        rows[slots, 512:528] = scale.view(torch.uint8)
    else:
        rows, scales = v4_planes(cache)
        page, offset = slots // 64, slots % 64
        rows[page, offset, :448] = values[:, :448]
        scales[page, offset, :7] = (exponent + 127 - 40).to(torch.uint8)[:, None]
        # f16 has both parts of a key only if they are not too far apart.
        rope = rows[page, offset, 448:].view(BF16).float() * torch.exp2(exponent - 40)[:, None]
        rows[page, offset, 448:] = rope.bfloat16().view(torch.uint8)
    q = torch.zeros(254, 1, 16, LAYOUTS[layout][0], dtype=BF16, device="cuda")
    out, lse = dsa.flash_mla_with_kvcache(
        *(q, cache, None, None, D_V, None), is_fp8_kvcache=True, indices=slots.int().view(-1, 1, 1)
    )
    expected = kv_cache.read_kv_cache(cache, slots)[:, None, None, :D_V].expand_as(out)
    if layout.endswith("any scales"):
        assert_rounded_twice(out, expected)
    else:
        assert torch.equal(out, expected.bfloat16())
    assert lse.eq(0).all()


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("layout", BYTES)
def test_scales_that_are_far_apart(layout, heads):
    """Within a key: what f16 does not have of the smaller ones is no more than 2^-22 of the largest."""
    cache, slots = make_cache(layout, 60, 64)
    apart = torch.arange(60, device="cuda") // 2.0
    if "656" in layout:
        rows = cache.view(-1, 656)
        scale = rows[slots, 512:528].contiguous().view(torch.float32)
        scale[:, 1:] *= torch.exp2(-apart)[:, None]
        rows[slots, 512:528] = scale.view(torch.uint8)
        largest = torch.exp2(scale.amax(1).log2().floor())
    else:
        rows, scales = v4_planes(cache)
        page, offset = slots // 64, slots % 64
        scales[page, offset, :7] = (120 - apart).to(torch.uint8)[:, None]
        rope = rows[page, offset, 448:].contiguous().view(BF16).abs().amax(1).double()
        largest = torch.maximum(torch.exp2(-7 - apart.floor()).double(), torch.exp2(rope.log2().floor() - 9))
    q = torch.randn(60, 1, heads, LAYOUTS[layout][0], dtype=BF16, device="cuda")
    out, _ = dsa.flash_mla_with_kvcache(
        *(q, cache, None, None, D_V, None), is_fp8_kvcache=True, indices=slots.int().view(-1, 1, 1)
    )
    expected = kv_cache.read_kv_cache(cache, slots)[:, None, None, :D_V].expand_as(out).double()
    error = (out.double() - expected).abs()
    left_out = largest.double()[:, None, None, None] * 2**-22
    assert (error <= expected.abs() * (2**-8 + 9 / 8 * 2**-11) + left_out).all()


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_nobody_selects(layout, heads):
    """Whatever the unused rows hold, pad bytes included, changes no bit."""
    case = Case(layout, 4, 2, heads, 500)
    clean = case.check()
    unused = unused_slots(case.cache, case.slots)
    if "584" in layout:
        rows, scales = v4_planes(case.cache)
        page, offset = unused // 64, unused % 64
        for value, scale in ((0x7F, 0xFF), (0x00, 0xFF), (0x7F, 0x7F), (0xFF, 0x00)):
            rows[page, offset], scales[page, offset] = value, scale
            scales[..., 7] = value
            assert_same_bits(case.run(), clean)
    elif "656" in layout:
        rows = case.cache.view(-1, 656)
        for value, scale in ((0x7F, NAN), (0x00, NAN), (0x7F, 1.0), (0x01, INF)):
            rows[unused] = value
            rows[unused, 512:528] = torch.full((4,), scale, device="cuda").view(torch.uint8)
            assert_same_bits(case.run(), clean)
    else:
        for value in (NAN, INF, -INF, 0.0):
            case.cache.view(-1, case.d)[unused] = value
            assert_same_bits(case.run(), clean)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_nan_reaches_the_queries_that_select_it(layout, heads):
    case = Case(layout, 5, 2, heads, 300, invalid=0.0)
    clean = case.run()
    case.options["indices"][3, 1, 200] = unused_slots(case.cache, case.slots)[0].int()
    out, lse = case.run()
    assert out[3, 1].isnan().all() and lse[3, :, 1].isnan().all()
    out[3, 1], lse[3, :, 1] = clean[0][3, 1], clean[1][3, :, 1]
    assert_same_bits((out, lse), clean)


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
@pytest.mark.parametrize(("scale", "largest"), [(100.0, 30), (24000.0, 5e3)])
def test_large_logits(scale, largest, layout, record_error):
    """A softmax of few keys, and powers that would overflow if they were not relative; with splits and without."""
    for case in (Case(layout, 20, 1, 64, 500), Case(layout, 1, 1, 128, 6000, rows=7000)):
        _, lse = case.check(record_error, softmax_scale=scale)
        assert lse.min() > largest


@pytest.mark.parametrize("layout", ["656 bytes", "584 bytes", "bf16, 512"])
def test_plans_of_both_styles(layout):
    """A plan's object is filled by the first call, and serves others with these shapes, whatever they select."""
    case = Case(layout, 3, 2, 64, 1000)
    old = dsa.get_mla_metadata(int32([9, 0, 5000]), 128, 1, 64, case.options["is_fp8_kvcache"], 1000)
    new, nothing = dsa.get_mla_metadata()
    for plan in (old, (new, nothing), (new, None), (None, None)):
        case.check(plan=plan)
    for invalid in (0.0, 0.9):
        case.options["indices"] = pick(case.slots, case.cache, 3, 2, 1000, invalid)
        case.check(plan=(new, None))
    with pytest.raises(ValueError, match="tile_scheduler_metadata: was first used with"):
        case.run(new, indices=case.options["indices"][..., :999])


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
@pytest.mark.parametrize(("batch", "heads", "k"), [(3, 128, 2048), (1, 16, 9000), (200, 64, 300)])
def test_runs_are_bit_identical(layout, batch, heads, k):
    case = Case(layout, batch, 1, heads, k, rows=max(3000, k), extra=(100, 16))
    assert_runs_have_the_same_bits(case.run, times=50)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_batch_invariant(layout, heads, record_error):
    """A sequence's result in a batch, in another order, and alone, bit for bit."""
    case = Case(layout, 7, 2, heads, 2048)
    lengths = int32([2048, 0, 1, 64, 1500, 65, 2000])
    out, lse = case.check(record_error, topk_length=lengths, enable_batch_invariant=True)
    for rows in (torch.randperm(7, device="cuda"), *torch.arange(7, device="cuda").split(1)):
        part = {"q": case.q[rows], "indices": case.options["indices"][rows], "topk_length": lengths[rows]}
        got = case.run(**part, enable_batch_invariant=True)
        assert_same_bits(got, (out[rows], lse[rows]))


@pytest.mark.parametrize("heads", [8, 32, 64, 128])
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_batch_invariant_whatever_the_queries_of_a_sequence(layout, heads):
    """Each with lists of its own, without lengths: the tiles of the second list are where they are with one query."""
    case = Case(layout, 8, 4, heads, 128, extra=(200, 16))
    columns = torch.arange(128, device="cuda")
    visible = 59 + torch.arange(8, device="cuda")[:, None] + torch.arange(4, device="cuda")
    case.options["indices"] = torch.where(columns < visible[..., None], case.options["indices"], -1)
    names = "indices", "extra_indices_in_kvcache"
    out, lse = case.check(enable_batch_invariant=True)
    for queries in (slice(0, 1), slice(1, 3), slice(3, 4), slice(0, 3)):
        part = {"q": case.q[:, queries]} | {name: case.options[name][:, queries] for name in names}
        assert_same_bits(case.run(**part, enable_batch_invariant=True), (out[:, queries], lse[..., queries]))


@pytest.mark.parametrize("k", [1, 70, 128, 192, 256])
@pytest.mark.parametrize("heads", [16, 20, 64, 128])
@pytest.mark.parametrize("layout", ["656 bytes", "584 bytes"])
def test_short_lists_do_not_depend_on_the_batch(layout, heads, k):
    """Whatever the heads of a CTA, whose number follows that of the queries."""
    case = Case(layout, 300, 1, heads, k, rows=1000, invalid=0.0)
    whole = case.run()
    for rows in (slice(0, 1), slice(100, 108), slice(7, 39), slice(200, 300)):
        part = case.run(q=case.q[rows], indices=case.options["indices"][rows])
        assert_same_bits(part, [x[rows] for x in whole])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_no_bit(layout):
    """q, indices and caches as parts of larger tensors, which hold NaN and other keys around them."""
    case = Case(layout, 3, 2, 32, 333, 16, extra=(70, 64))
    options = {"attn_sink": torch.randn(32, device="cuda"), "topk_length": int32([300, 5, 400])}
    expected = case.check(**options)
    q, indices, more = case.q, case.options["indices"], case.options["extra_indices_in_kvcache"]
    changes = [
        {"q": among_nan(q)},
        {"q": q.transpose(1, 2).contiguous().transpose(1, 2)},
        {"q": torch.stack((q, q * NAN), 2)[:, :, 0]},
        {"indices": torch.nn.functional.pad(indices, (1, 2), value=5)[..., 1:334]},
        {"indices": indices.transpose(0, 1).contiguous().transpose(0, 1)},
        {"extra_indices_in_kvcache": torch.nn.functional.pad(more, (3, 0), value=5)[..., 3:]},
        *({name: torch.stack((x, x + 1), 1)[:, 0]} for name, x in options.items()),
        *({"k_cache": cache} for cache in with_gaps(layout, case.cache)),
        *({"extra_k_cache": cache} for cache in with_gaps(layout, case.options["extra_k_cache"])),
    ]
    for change in changes:
        assert_same_bits(case.run(**{**options, **change}), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["656 bytes", "584 bytes"])
def test_bytes_by_other_names(layout, dtype):
    case = Case(layout, 2, 1, 64, 200, extra=(100, 16))
    more = case.options["extra_k_cache"]
    assert_same_bits(case.run(k_cache=case.cache.view(dtype), extra_k_cache=more.view(dtype)), case.run())


def at_the_end_of_2_to_the_31(layout, cache, indices):
    """A copy of the cache, whose pages are the last ones of more than 2^31 numbers or bytes, and the indices there."""
    first = 2**31 // cache.stride(0) + 10
    large = empty_cache(layout, first + len(cache), 64)
    assert large.stride(0) * (len(large) - 1) > 2**31
    # Bytes by pages: a V4 page is one block of them, whatever its shape says.
    large[first:] = cache
    return large, torch.where((indices >= 0) & (indices < size(cache)), indices + 64 * first, -1)


@pytest.mark.parametrize("layout", ["bf16, 576", "656 bytes", "584 bytes", "584 bytes, unpadded"])
def test_caches_beyond_2_to_the_31(layout):
    case = Case(layout, 3, 1, 64, 300, extra=(200, 64))
    names = "extra_k_cache", "extra_indices_in_kvcache"
    cache, indices = at_the_end_of_2_to_the_31(layout, case.cache, case.options["indices"])
    more = at_the_end_of_2_to_the_31(layout, *(case.options[name] for name in names))
    assert_same_bits(case.run(k_cache=cache, indices=indices, **dict(zip(names, more))), case.check())


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
@pytest.mark.parametrize(("batch", "s_q"), [(1, 1), (3, 2), (1, 70), (150, 1)])
def test_into_a_part_of_a_tensor(layout, heads, batch, s_q):
    """Of one with more heads, as where heads are padded, whose other numbers stay as they are; with the same bits,
    of queries that are split and of whole ones."""
    case = Case(layout, batch, s_q, heads, 1000, extra=(100, 16))
    for options in ({"attn_sink": torch.randn(heads, device="cuda")}, {"enable_batch_invariant": True}):
        expected = case.run(**options)
        assert expected[1].shape == (batch, heads, s_q) and expected[1].transpose(1, 2).is_contiguous()
        whole, out = assert_writes_a_part(functools.partial(case.run, **options), expected)
    case.run(k_cache=case.cache[:0], extra_k_cache=None, extra_indices_in_kvcache=None, out=out)
    assert not out.any() and whole.isnan().sum() == whole.numel() - out.numel()


@pytest.mark.parametrize("style", ["planned in the graph", "planned before it", "no plan", "batch-invariant"])
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize(
    ("layout", "batch", "heads"), [("656 bytes", 3, 128), ("584 bytes", 40, 16), ("bf16, 576", 1, 64)]
)
def test_a_graph_takes_new_data(layout, batch, heads, into, style, record_error):
    """New queries, keys, selections and lengths: none, few, all. into: the caller's memory, a part of more heads."""

    def inputs(low, high):
        new = Case(layout, batch, 2, heads, 700, extra=(300, 16), invalid=0.1)
        lengths = torch.randint(low, high, (2, batch), dtype=torch.int32, device="cuda")
        return new, (
            new.q,
            new.cache,
            *(new.options[name] for name in LISTS),
            *lengths,
            torch.randn(heads, device="cuda"),
        )

    case, given = inputs(0, 1)
    options = dict(zip(("topk_length", "extra_topk_length", "attn_sink"), given[-3:]))
    options["enable_batch_invariant"] = style == "batch-invariant"
    whole = torch.full((batch, 2, heads + 8, D_V), NAN, dtype=case.q.dtype, device="cuda")
    memory = {"out": whole[:, :, 4:-4]} if into else {}
    kept = dsa.get_mla_metadata() if style == "planned before it" else (None, None)

    def call(*_):
        plan = dsa.get_mla_metadata() if style == "planned in the graph" else kept
        return case.run(*plan, **options, **memory)

    bounds = iter([(0, 1), (-5, 900), (700, 701), (0, 70)])
    for out, lse in replays(call, given, lambda: inputs(*next(bounds))[1], times=4):
        case.check(record_error, got=(out.contiguous(), lse), **options)
        assert whole[:, :, :4].isnan().all() and whole[:, :, -4:].isnan().all()


def test_the_kernels_run_on_the_current_stream():
    case = Case("656 bytes", 3, 2, 128, 2048)

    def call(q, cache, indices):
        return case.run(q=q, k_cache=cache, indices=indices)

    assert_runs_on_the_current_stream(call, case.q, case.cache, case.options["indices"])


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    case = Case("656 bytes", 3, 2, 128, 2048)

    def call(q, cache, indices):
        return case.run(q=q, k_cache=cache, indices=indices)

    assert_same_on_the_second_gpu(call, case.q, case.cache, case.options["indices"])
