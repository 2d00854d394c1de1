"""MLA decoding over selected keys on the GPU: every cache layout, one cache and two, splits, NaN, extremes, graphs."""

import pytest
import torch

import dsa
from dsa.cases.attention import LAYOUTS, empty_cache, filled_cache
from tests.gpu.attention import (
    BF16,
    D_V,
    INF,
    NAN,
    SINKS,
    assert_writes_a_part,
    case_of,
    checked,
    int32,
    maker,
    no_keys,
    replayed,
    spoiled,
    twice,
)
from tests.gpu.mla.caches import FEW_LAYOUTS, slots_of, v4_planes, with_gaps
from tests.gpu.op_checks import among_nan, assert_same_bits

CASE = case_of("flash_mla_with_kvcache v32")
PLAIN = {"sink": False, "counted": False, "extra": None, "invalid": 0.05, "page": 64}
BYTES = [name for name in LAYOUTS if "bytes" in name]
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
few_layouts = pytest.mark.parametrize("layout", FEW_LAYOUTS)
LISTS = "indices", "extra_indices_in_kvcache"


def inputs(layout, batch=2, s_q=1, heads=128, top_k=512, rows=3000, **options):
    sizes = {"batch": batch, "s_q": s_q, "heads": heads, "top_k": top_k, "rows": rows}
    return CASE.arguments("cuda", layout=layout, **sizes, **PLAIN | options)


def verify(record_error, layout, batch=2, s_q=1, heads=128, top_k=512, rows=3000, **options):
    checked(CASE, inputs(layout, batch, s_q, heads, top_k, rows, **options), record_error)


def size(cache):
    """Its slots."""
    return cache.shape[0] * cache.shape[1]


def part_of(given, batch=slice(None), queries=slice(None)):
    """The call for some sequences, or for some queries of each."""
    part = {name: given[name][batch][:, queries] for name in ("q", *LISTS) if given[name] is not None}
    counts = {name: given[name][batch] for name in ("topk_length", "extra_topk_length") if given[name] is not None}
    return given | part | counts


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 80, 128])
@by_layout
def test_layouts_and_heads_are_right(layout, heads, record_error):
    verify(record_error, layout, 3, 2, heads, sink=True)


@pytest.mark.parametrize(
    ("batch", "s_q", "k"),
    [
        *((2, s_q, 300) for s_q in (1, 2, 3, 4, 5, 8)),
        *((3, 1, k) for k in (1, 3, 63, 64, 65, 127, 512, 1024, 2047, 2048)),
        *((batch, 1, 2048) for batch in (1, 2, 17, 128)),
    ],
)
@pytest.mark.parametrize("heads", [16, 64, 128])
@few_layouts
def test_queries_and_keys_are_right(layout, heads, batch, s_q, k, record_error):
    verify(record_error, layout, batch, s_q, heads, k)


@pytest.mark.parametrize("page", [1, 16, 48, 64, 256])
@by_layout
def test_pages_of_any_size_are_right(layout, page, record_error):
    if layout == "584 bytes, unpadded" and page == 1:
        page = 2  # or pages would not start at multiples of 16 bytes
    verify(record_error, layout, 2, 1, 64, 500, page=page)
    verify(record_error, layout, 2, 1, 16, 200, page=page, extra=(100, 3 * page))


@pytest.mark.parametrize(("layout", "heads"), [("656 bytes", 16), ("584 bytes", 64), ("fp16, 576", 8)])
def test_many_sequences_are_right(layout, heads, record_error):
    verify(record_error, layout, 4096, 1, heads, 70, counted=True)


@pytest.mark.parametrize("heads", [16, 64, 128])
@few_layouts
def test_splits_are_right(layout, heads, record_error):
    """One sequence or two with as many keys as keep every SM busy, evenly and not."""
    verify(record_error, layout, 1, 1, heads, 20_001, 25_000)
    given = inputs(layout, 2, 1, heads, 9000, 10_000, extra=(5000, 64))
    counts = {"topk_length": int32([9000, 40]), "extra_topk_length": int32([3, 4000])}
    checked(CASE, given | counts, record_error)


@few_layouts
def test_one_cache_without_keys_leaves_the_other(layout, record_error):
    given = inputs(layout, 3, 2, 64, 300, extra=(200, 16))
    none = {name: given[name][..., :0] for name in LISTS}
    checked(CASE, given | {"indices": none["indices"]}, record_error)
    checked(CASE, given | {LISTS[1]: none[LISTS[1]]}, record_error)
    checked(CASE, given | {"extra_k_cache": given["extra_k_cache"][:0]}, record_error)
    checked(CASE, given | {"k_cache": given["k_cache"][:0]}, record_error)
    out, lse = checked(CASE, given | none)
    assert out.eq(0).all() and lse.eq(INF).all()


@pytest.mark.parametrize("heads", [16, 128])
@few_layouts
def test_keys_after_topk_length_are_not_looked_at(layout, heads, record_error):
    """They are NaN."""
    counts = int32([0, 1, 63, 64, 65, 500, 999, 1000, 1001, 2**31 - 1, -1, -(2**31)])
    given = inputs(layout, len(counts), 2, heads, 1000, extra=(130, 16))
    given |= {"topk_length": counts, "extra_topk_length": counts.flip(0)}
    for name, cache, count in zip(LISTS, ("k_cache", "extra_k_cache"), ("topk_length", "extra_topk_length")):
        beyond = torch.arange(given[name].shape[2], device="cuda") >= given[count][:, None, None]
        given[name].masked_fill_(beyond, int(slots_of(given[cache])[1][0]))
    checked(CASE, given, record_error)


@pytest.mark.parametrize(
    ("k", "extra"), [(128, (512, 64)), (2048, (64, 16)), (65, (1, 2)), (1, (700, 48)), (640, (333, 6))]
)
@by_layout
def test_two_caches_are_right(layout, k, extra, record_error):
    given = inputs(layout, 5, 2, 64, k, page=256, extra=extra)
    checked(CASE, given, record_error)
    given["attn_sink"] = torch.randn(64, device="cuda")
    checked(CASE, given | {"topk_length": int32([0, 1, k, k // 2, 9])}, record_error)
    counts = {"topk_length": int32([k, 0, 0, 5, 64]), "extra_topk_length": int32([0, extra[0], 0, 3, 64])}
    checked(CASE, given | counts, record_error)


@few_layouts
def test_sinks_scale_the_output_alone(layout, record_error):
    sink = {"attn_sink": torch.tensor(SINKS, device="cuda")}
    given = inputs(layout, 4, 2, 8)
    given["indices"][2] = -1
    out, lse = checked(CASE, given | sink, record_error)
    plain, plain_lse = CASE.run(given)
    assert torch.equal(lse, plain_lse) and torch.equal(out[:, :, 0], plain[:, :, 0]) and not out[:, :, [1, 7]].any()
    # With splits, where the sink comes in once.
    checked(CASE, inputs(layout, 1, 1, 8, 6000, 7000) | sink, record_error)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("invalid", [0.5, 0.98, 1.0])
@few_layouts
def test_indices_that_are_no_keys_are_ignored(layout, invalid, heads, record_error):
    given = inputs(layout, 3, 2, heads, 1000, invalid=invalid, extra=(200, 16))
    given["indices"][1] = given[LISTS[1]][1] = -1
    given["indices"][2, 0] = 2**31 - 1
    out, lse = checked(CASE, given, record_error)
    assert out[1].eq(0).all() and lse[1].eq(INF).all()


@pytest.mark.parametrize("heads", [16, 128])
@few_layouts
def test_tiles_without_keys_are_ignored(layout, heads, record_error):
    """Keys in the last place only, in the first, in one tile of many, in every other tile, and in the second cache."""
    given, place = inputs(layout, 8, 1, heads, 640, invalid=0.0, extra=(100, 16)), torch.arange(640, device="cuda")
    tile = place // 64
    kept = [place == 639, place == 0, place == 320, tile == 9, tile == 0, tile == 5, tile % 2 == 0, place < 0]
    bad = no_keys(size(given["k_cache"]))[place % 6]
    given["indices"] = torch.where(torch.stack(kept)[:, None], given["indices"], bad)
    checked(CASE, given, record_error)
    checked(CASE, given | {"extra_topk_length": int32([0] * 8)}, record_error)


@few_layouts
def test_a_key_named_twice_counts_twice(layout, record_error):
    given = inputs(layout, 3, 1, 64, 300, 40)
    given["indices"][0] = slots_of(given["k_cache"])[0][0].int()
    checked(CASE, given, record_error)


def of_one_key_each(layout, cache, slots, heads):
    """A call in which query t selects the key in slots[t] alone, and the values of these keys."""
    given = inputs(layout, len(slots), 1, heads, 1, 64)
    rows = dsa.reference.read_kv_cache(cache, slots)[:, None, None, :D_V].expand(-1, 1, heads, -1)
    return given | {"k_cache": cache, "indices": slots.int().view(-1, 1, 1)}, rows


def assert_rounded(out, expected, left_out=0.0):
    """To f16's 11 bits of a number in its range, within an eighth of a unit, and then to bf16's 8."""
    error = (out.double() - expected.double()).abs()
    assert (error <= expected.double().abs() * (2**-8 + 9 / 8 * 2**-11) + left_out).all()


@pytest.mark.parametrize("heads", [16, 64, 128])
@by_layout
def test_one_key_gives_its_value_exactly(layout, heads):
    """Its first 512 numbers, in bytes e4m3 times the scale; a product that f16 does not have is rounded to it first."""
    cache, slots = filled_cache(maker(), layout, 3000, 64)
    given, expected = of_one_key_each(layout, cache, slots[:30], heads)
    key = given["indices"][:, :, 0]
    for k, place in ((1, 0), (64, 63), (200, 131), (2000, 1999)):
        listed = no_keys(size(cache))[torch.randint(6, (30, 1, k), device="cuda")]
        listed[:, :, place] = key
        out, _ = checked(CASE, given | {"indices": listed})
        if layout.endswith("any scales"):
            assert_rounded(out, expected)
        else:
            assert torch.equal(out, expected.to(out.dtype))


@pytest.mark.parametrize("layout", BYTES)
def test_bytes_of_every_value_are_exact(layout):
    """All e4m3 numbers but NaN, and scales of every size."""
    cache, slots = filled_cache(maker(), layout, 254, 64)
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
    given, expected = of_one_key_each(layout, cache, slots, 16)
    out, lse = CASE.run(given | {"q": torch.zeros_like(given["q"])})
    if layout.endswith("any scales"):
        assert_rounded(out, expected)
    else:
        assert torch.equal(out, expected.bfloat16())
    assert lse.eq(0).all()


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("layout", BYTES)
def test_scales_that_are_far_apart_lose_little(layout, heads):
    """What f16 does not have of a key's smaller groups is no more than 2^-22 of the largest scale."""
    cache, slots = filled_cache(maker(), layout, 60, 64)
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
    given, expected = of_one_key_each(layout, cache, slots, heads)
    assert_rounded(CASE.run(given)[0], expected, largest.double()[:, None, None, None] * 2**-22)


@pytest.mark.parametrize("heads", [16, 128])
@by_layout
def test_rows_that_no_query_selects_change_no_bit(layout, heads):
    """Whatever they hold, pad bytes included."""
    given = inputs(layout, 4, 2, heads, 500)
    clean, cache = checked(CASE, given), given["k_cache"]
    unused = slots_of(cache)[1]
    if "584" in layout:
        rows, scales = v4_planes(cache)
        page, offset = unused // 64, unused % 64
        for value, scale in ((0x7F, 0xFF), (0x00, 0xFF), (0x7F, 0x7F), (0xFF, 0x00)):
            rows[page, offset], scales[page, offset] = value, scale
            scales[..., 7] = value
            assert_same_bits(CASE.run(given), clean)
    elif "656" in layout:
        rows = cache.view(-1, 656)
        for value, scale in ((0x7F, NAN), (0x00, NAN), (0x7F, 1.0), (0x01, INF)):
            rows[unused] = value
            rows[unused, 512:528] = torch.full((4,), scale, device="cuda").view(torch.uint8)
            assert_same_bits(CASE.run(given), clean)
    else:
        for value in (NAN, INF, -INF, 0.0):
            cache.view(-1, cache.shape[3])[unused] = value
            assert_same_bits(CASE.run(given), clean)


@pytest.mark.parametrize("heads", [16, 128])
@few_layouts
def test_nan_reaches_the_queries_that_select_it_alone(layout, heads):
    given = inputs(layout, 5, 2, heads, 300, invalid=0.0)
    clean = CASE.run(given)
    given["indices"][3, 1, 200] = slots_of(given["k_cache"])[1][0].int()
    out, lse = CASE.run(given)
    assert out[3, 1].isnan().all() and lse[3, :, 1].isnan().all()
    out[3, 1], lse[3, :, 1] = clean[0][3, 1], clean[1][3, :, 1]
    assert_same_bits((out, lse), clean)


@few_layouts
@pytest.mark.parametrize(("scale", "largest"), [(10.0, 30), (2400.0, 5e3)])
def test_large_logits_do_not_overflow(scale, largest, layout, record_error):
    """A softmax of few keys, and powers that would overflow if they were not relative; with splits and without."""
    for sizes in ((20, 1, 64, 500), (1, 1, 128, 6000, 7000)):
        _, lse = checked(CASE, inputs(layout, *sizes, scale=scale), record_error)
        assert lse.min() > largest


@pytest.mark.parametrize("layout", ["656 bytes", "584 bytes", "bf16, 512"])
def test_plans_of_both_styles_are_right(layout):
    """A plan's object is filled by the first call, and serves others with these shapes, whatever they select."""
    given = inputs(layout, 3, 2, 64, 1000)
    old = dsa.get_mla_metadata(int32([9, 0, 5000]), 128, 1, 64, given["is_fp8_kvcache"], 1000)
    new, nothing = dsa.get_mla_metadata()
    for plan in (old, (new, nothing), (new, None), (None, None)):
        given |= dict(zip(("tile_scheduler_metadata", "num_splits"), plan))
        checked(CASE, given)
    given |= {"tile_scheduler_metadata": new}
    for invalid in (0.0, 0.9):
        checked(CASE, given | {"indices": spoiled(given["indices"], size(given["k_cache"]), invalid)})
    with pytest.raises(ValueError, match="tile_scheduler_metadata: was first used with"):
        CASE.run(given | {"indices": given["indices"][..., :999]})


@pytest.mark.parametrize("heads", [16, 128])
@few_layouts
def test_a_batch_invariant_result_does_not_depend_on_other_sequences(layout, heads, record_error):
    """In a batch, in another order, and alone, bit for bit."""
    given = inputs(layout, 7, 2, heads, 2048, invariant=True)
    given["topk_length"] = int32([2048, 0, 1, 64, 1500, 65, 2000])
    whole = checked(CASE, given, record_error)
    for rows in (torch.randperm(7), *torch.arange(7).split(1)):
        assert_same_bits(CASE.run(part_of(given, rows.cuda())), [x[rows.cuda()] for x in whole])


@pytest.mark.parametrize("heads", [8, 32, 64, 128])
@few_layouts
def test_a_batch_invariant_result_does_not_depend_on_the_sequences_other_queries(layout, heads):
    """Each with its own lists, without lengths: the tiles of the second list are where they are with one query."""
    given = inputs(layout, 8, 4, heads, 128, extra=(200, 16), invariant=True)
    visible = 59 + torch.arange(8, device="cuda")[:, None] + torch.arange(4, device="cuda")
    given["indices"] = given["indices"].where(torch.arange(128, device="cuda") < visible[..., None], -1)
    out, lse = checked(CASE, given)
    for queries in (slice(0, 1), slice(1, 3), slice(3, 4), slice(0, 3)):
        assert_same_bits(CASE.run(part_of(given, queries=queries)), (out[:, queries], lse[..., queries]))


@pytest.mark.parametrize("k", [1, 70, 128, 192, 256])
@pytest.mark.parametrize("heads", [16, 20, 64, 128])
@pytest.mark.parametrize("layout", ["656 bytes", "584 bytes"])
def test_short_lists_do_not_depend_on_the_batch(layout, heads, k):
    """Whatever the heads of a CTA, whose number follows that of the queries."""
    given = inputs(layout, 300, 1, heads, k, 1000, invalid=0.0)
    whole = CASE.run(given)
    for rows in (slice(0, 1), slice(100, 108), slice(7, 39), slice(200, 300)):
        assert_same_bits(CASE.run(part_of(given, rows)), [x[rows] for x in whole])


@by_layout
def test_strides_change_no_bit(layout):
    """q, indices and caches as parts of larger tensors, which hold NaN and other keys around them."""
    given = inputs(layout, 3, 2, 32, 333, page=16, extra=(70, 64), sink=True)
    given["topk_length"] = int32([300, 5, 400])
    expected = checked(CASE, given)
    q, indices, more = given["q"], given["indices"], given[LISTS[1]]
    changes = [
        {"q": among_nan(q)},
        {"q": q.transpose(1, 2).contiguous().transpose(1, 2)},
        {"q": twice(q, dim=2)},
        {"indices": torch.nn.functional.pad(indices, (1, 2), value=5)[..., 1:334]},
        {"indices": indices.transpose(0, 1).contiguous().transpose(0, 1)},
        {LISTS[1]: torch.nn.functional.pad(more, (3, 0), value=5)[..., 3:]},
        *({name: twice(given[name], given[name] + 1)} for name in ("attn_sink", "topk_length")),
        *({name: cache} for name in ("k_cache", "extra_k_cache") for cache in with_gaps(layout, given[name])),
    ]
    for change in changes:
        assert_same_bits(CASE.run(given | change), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["656 bytes", "584 bytes"])
def test_bytes_by_other_names_give_the_same_bits(layout, dtype):
    given = inputs(layout, 2, 1, 64, 200, extra=(100, 16))
    caches = {name: given[name].view(dtype) for name in ("k_cache", "extra_k_cache")}
    assert_same_bits(CASE.run(given | caches), CASE.run(given))


def at_the_end_of_2_to_the_31(layout, cache, indices):
    """A copy of the cache, whose pages are the last ones of more than 2^31 numbers or bytes, and the indices there."""
    first = 2**31 // cache.stride(0) + 10
    large = empty_cache("cuda", layout, first + len(cache), 64)
    assert large.stride(0) * (len(large) - 1) > 2**31
    # Bytes by pages: a V4 page is one block of them, whatever its shape says.
    large[first:] = cache
    return large, torch.where((indices >= 0) & (indices < size(cache)), indices + 64 * first, -1)


@pytest.mark.parametrize("layout", ["bf16, 576", "656 bytes", "584 bytes", "584 bytes, unpadded"])
def test_caches_beyond_2_to_the_31(layout):
    given, changed = inputs(layout, 3, 1, 64, 300, extra=(200, 64)), {}
    for cache, lists in zip(("k_cache", "extra_k_cache"), LISTS):
        changed[cache], changed[lists] = at_the_end_of_2_to_the_31(layout, given[cache], given[lists])
    assert_same_bits(CASE.run(given | changed), checked(CASE, given))


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 128])
@few_layouts
@pytest.mark.parametrize(("batch", "s_q"), [(1, 1), (3, 2), (1, 70), (150, 1)])
def test_a_part_of_a_tensor_is_written(layout, heads, batch, s_q):
    """Of queries that are split and of whole ones. The LSE is a view of [B, s_q, H]."""
    given = inputs(layout, batch, s_q, heads, 1000, extra=(100, 16))
    for options in ({"attn_sink": torch.randn(heads, device="cuda")}, {"enable_batch_invariant": True}):
        lse = CASE.run(given | options)[1]
        assert lse.shape == (batch, heads, s_q) and lse.transpose(1, 2).is_contiguous()
        whole = assert_writes_a_part(CASE, given | options)
    out = whole[:, :, 1 : 1 + heads]
    CASE.run(given | {"k_cache": given["k_cache"][:0], "extra_k_cache": None, LISTS[1]: None, "out": out})
    assert not out.any() and whole.isnan().sum() == whole.numel() - out.numel()


@pytest.mark.parametrize("style", ["planned in the graph", "planned before it", "no plan", "batch-invariant"])
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize(
    ("layout", "batch", "heads"), [("656 bytes", 3, 128), ("584 bytes", 40, 16), ("bf16, 576", 1, 64)]
)
def test_a_graph_takes_new_data(layout, batch, heads, into, style, record_error):
    """New queries, keys, selections and lengths: none, few, all. into: the caller's memory, a part of more heads."""

    def fresh(seed, low, high):
        options = {"invalid": 0.1, "sink": True, "counted": True, "seed": seed}
        new = inputs(layout, batch, 2, heads, 700, extra=(300, 16), **options)
        for name in ("topk_length", "extra_topk_length"):
            new[name] = torch.randint(low, high, (batch,), dtype=torch.int32, device="cuda")
        return new

    given = fresh(0, 0, 1) | {"enable_batch_invariant": style == "batch-invariant"}
    whole = torch.full((batch, 2, heads + 8, D_V), NAN, dtype=given["q"].dtype, device="cuda")
    options = {"out": whole[:, :, 4:-4]} if into else {}
    before = dsa.get_mla_metadata()[0] if style == "planned before it" else None

    def call():
        meta = dsa.get_mla_metadata()[0] if style == "planned in the graph" else before
        return CASE.run(given | options | {"tile_scheduler_metadata": meta})

    bounds = [(0, 1), (-5, 900), (700, 701), (0, 70)]
    for found in replayed(call, given, (fresh(seed, *x) for seed, x in enumerate(bounds, 1))):
        record_error(CASE.check(given, found))
        assert whole[:, :, :4].isnan().all() and whole[:, :, -4:].isnan().all()
