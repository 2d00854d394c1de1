"""Decoding over selected keys by flash_mla_with_kvcache on the GPU: every cache layout, one cache and two caches, split
lists, plans, and CUDA graphs."""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases.attention import LAYOUTS, filled_cache
from tests.gpu.attention import BF16, D_V, INF, NAN, case_of, checked, int32, maker, replayed, spoiled
from tests.gpu.mla.caches import FEW_LAYOUTS, slots_of, v4_planes
from tests.gpu.mla.selected_keys import Op, SelectedKeys, size
from tests.gpu.op_checks import assert_rows_stand_alone, assert_same_bits

CASE = case_of("flash_mla_with_kvcache v32")
PLAIN = {"sink": False, "counted": False, "extra": None, "invalid": 0.05, "page": 64}
BYTES = [name for name in LAYOUTS if "bytes" in name]
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
NARROW = "bf16, 160"  # its kernel takes no second cache
few_layouts = pytest.mark.parametrize("layout", FEW_LAYOUTS)
by_heads = pytest.mark.parametrize("heads", [16, 64, 128])
LISTS = "indices", "extra_indices_in_kvcache"
FIRST, SECOND = zip(("k_cache", "extra_k_cache"), LISTS, ("topk_length", "extra_topk_length"), strict=True)
# FEW_SIZES: (sequences, queries, selected keys, keys). SIZES: (layout, sequences, queries, heads, selected keys, keys).
FEW_SIZES = [
    *((2, s_q, 300, 3000) for s_q in (1, 2, 3, 4, 5, 8)),
    *((3, 1, k, 3000) for k in (1, 3, 63, 64, 65, 127, 512, 1024, 2047, 2048)),
    *((batch, 1, 2048, 3000) for batch in (1, 2, 17, 128)),
    (1, 1, 20_001, 25_000),
]
SIZES = [
    *((layout, 3, 2, heads, 512, 3000) for layout in LAYOUTS for heads in (1, 8, 16, 32, 64, 80, 128)),
    *((layout, b, s_q, h, k, n) for layout in FEW_LAYOUTS for b, s_q, k, n in FEW_SIZES for h in (16, 64, 128)),
    *(("656 bytes", 4096, 1, 16, 70, 3000), ("584 bytes", 4096, 1, 64, 70, 3000), ("fp16, 576", 4096, 1, 8, 70, 3000)),
]


def inputs(layout, batch=2, s_q=1, heads=128, top_k=512, rows=3000, **options):
    sizes = {"batch": batch, "s_q": s_q, "heads": heads, "top_k": top_k, "rows": rows}
    return CASE.arguments("cuda", layout=layout, **sizes, **PLAIN | options)


def nan_after_counts(given):
    """Return the arguments, where the indices from topk_length (extra_topk_length) on select a key that is NaN."""
    changed = {}
    for cache, indices, counts in (FIRST, SECOND):
        if given[counts] is not None:
            after = torch.arange(given[indices].shape[2], device="cuda") >= given[counts][:, None, None]
            changed[indices] = given[indices].masked_fill(after, int(slots_of(given[cache])[1][0]))
    return given | changed


@pytest.fixture(params=product(FEW_LAYOUTS, (16, 64, 128)), ids=str)
def op(request):
    layout, heads = request.param

    def make(tokens, heads, keys, top_k, **options):
        return inputs(layout, tokens, 1, heads, top_k, keys, **{"invalid": 0.0} | options)

    return Op(CASE, make, heads, {"invariant": True})


class TestSelectedKeys(SelectedKeys):
    """Run the shared tests with caches of several layouts."""


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_are_right(sizes, record_error):
    checked(CASE, inputs(*sizes, sink=True, counted=sizes[1] > 1000), record_error)


@pytest.mark.parametrize("page", [1, 16, 48, 64, 256])
@by_layout
def test_pages_of_any_size_are_right(layout, page, record_error):
    if layout == "584 bytes, unpadded" and page == 1:
        page = 2  # pages must start at multiples of 16 bytes
    checked(CASE, inputs(layout, 2, 1, 64, 500, page=page), record_error)
    if layout != NARROW:
        checked(CASE, inputs(layout, 2, 1, 16, 200, page=page, extra=(100, 3 * page)), record_error)


@by_heads
@few_layouts
def test_splits_of_different_lengths_are_right(layout, heads, record_error):
    given = inputs(layout, 2, 1, heads, 9000, 10_000, extra=(5000, 64))
    counts = {"topk_length": int32([9000, 40]), "extra_topk_length": int32([3, 4000])}
    checked(CASE, given | counts, record_error)


@pytest.mark.parametrize(
    ("k", "extra"), [(128, (512, 64)), (2048, (64, 16)), (65, (1, 2)), (1, (700, 48)), (640, (333, 6))]
)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != NARROW])
def test_two_caches_are_right(layout, k, extra, record_error):
    given = inputs(layout, 5, 2, 64, k, page=256, extra=extra)
    checked(CASE, given, record_error)
    given["attn_sink"] = torch.randn(64, device="cuda")
    for of_first, of_second in (
        ([0, 1, k, k // 2, 9], None),
        ([k, 0, 0, 5, 64], [0, extra[0], 0, 3, 64]),
        ([2**31 - 1, -1, 63, 0, -(2**31)], [-1, 2**31 - 1, 65, 0, 3]),
    ):
        counts = {"topk_length": int32(of_first), "extra_topk_length": of_second and int32(of_second)}
        checked(CASE, nan_after_counts(given | counts), record_error)


@few_layouts
def test_one_cache_without_keys_leaves_the_other(layout, record_error):
    given = inputs(layout, 3, 2, 64, 300, extra=(200, 16))
    empty = {name: given[name][..., :0] for name in LISTS} | {name: given[name][:0] for name, *_ in (FIRST, SECOND)}
    for name, nothing in empty.items():
        checked(CASE, given | {name: nothing}, record_error)
    out, lse = checked(CASE, given | {name: empty[name] for name in LISTS})
    assert out.eq(0).all() and lse.eq(INF).all()


@pytest.mark.parametrize("invalid", [0.5, 0.98, 1.0])
@few_layouts
def test_indices_that_are_no_keys_of_either_cache_are_ignored(layout, invalid, record_error):
    given = inputs(layout, 3, 2, 128, 1000, invalid=invalid, extra=(200, 16))
    given["indices"][1] = given[LISTS[1]][1] = -1
    out, lse = checked(CASE, given, record_error)
    assert out[1].eq(0).all() and lse[1].eq(INF).all()


def of_one_key_each(layout, cache, slots, heads):
    given = inputs(layout, len(slots), 1, heads, 1, 64)
    rows = dsa.reference.read_kv_cache(cache, slots)[:, None, None, :D_V].expand(-1, 1, heads, -1)
    return given | {"k_cache": cache, "indices": slots.int().view(-1, 1, 1)}, rows


def assert_rounded(out, expected, left_out=0.0):
    """Require `expected` up to two roundings, first to fp16 (11 bits), then to bf16 (8 bits). For fp16 the allowed
    error is 9/8 times that of rounding to nearest.

    left_out: absolute error that is allowed in addition
    """
    error = (out.double() - expected.double()).abs()
    assert (error <= expected.double().abs() * (2**-8 + 9 / 8 * 2**-11) + left_out).all()


@by_heads
def test_one_key_with_any_scales_gives_its_rounded_value(heads):
    """The kernel rounds the product of an e4m3 number and its scale to fp16."""
    layout = "656 bytes, any scales"
    given, expected = of_one_key_each(layout, *filled_cache(maker(), layout, 30, 64), heads)
    assert_rounded(checked(CASE, given)[0], expected)


@pytest.mark.parametrize("layout", BYTES)
def test_bytes_of_every_value_are_exact(layout):
    """Each key contains all e4m3 numbers except NaN. The scale of a key is a power of two; with "any scales" it is up
    to twice this power."""
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
        # The kernel scales all channels of a key by one power of two before it converts them to fp16. So the rope
        # channels must be as large as the others.
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
    """fp16 causes an absolute error of at most 2^-22 S. S is the largest scale of a key, rounded down to a power of
    two.

    With 656 bytes the scales of groups 1 to 3 are multiplied by 2^0 to 2^-29. With 584 bytes the scales of a key are
    all 2^-7 to all 2^-36, and the rope channels are larger. There, S can also be the largest rope channel, rounded down
    to a power of two and divided by 2^9."""
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


@pytest.mark.parametrize("layout", ["656 bytes", "584 bytes", "bf16, 512"])
def test_plans_of_both_styles_are_right(layout):
    """The first call with `new` makes the plan. It is then valid for calls of the same shapes with any selection."""
    given = inputs(layout, 3, 2, 64, 1000)
    old = dsa.get_mla_metadata(int32([9, 0, 5000]), 128, 1, 64, given["is_fp8_kvcache"], 1000)
    new, nothing = dsa.get_mla_metadata()
    for plan in (old, (None, None), (new, None), (new, nothing)):
        given |= dict(zip(("tile_scheduler_metadata", "num_splits"), plan))
        checked(CASE, given)
    for invalid in (0.0, 0.9):
        checked(CASE, given | {"indices": spoiled(given["indices"], size(given), invalid)})
    with pytest.raises(ValueError, match="tile_scheduler_metadata: was first used with"):
        CASE.run(given | {"indices": given["indices"][..., :999]})


@pytest.mark.parametrize("heads", [8, 32, 64, 128])
@few_layouts
def test_a_batch_invariant_result_does_not_depend_on_the_sequences_other_queries(layout, heads):
    """The call has no topk_length, so the second list always begins at the same tile."""
    given = inputs(layout, 8, 4, heads, 128, extra=(200, 16), invariant=True)
    visible = 59 + torch.arange(8, device="cuda")[:, None] + torch.arange(4, device="cuda")
    given["indices"] = given["indices"].where(torch.arange(128, device="cuda") < visible[..., None], -1)
    out, lse = checked(CASE, given)
    for queries in (slice(0, 1), slice(1, 3), slice(3, 4), slice(0, 3)):
        part = {name: given[name][:, queries] for name in ("q", *LISTS)}
        assert_same_bits(CASE.run(given | part), (out[:, queries], lse[..., queries]))


@pytest.mark.parametrize("k", [1, 70, 128, 192, 256])
@pytest.mark.parametrize("heads", [16, 20, 64, 128])
@pytest.mark.parametrize("layout", ["656 bytes", "584 bytes"])
def test_short_lists_do_not_depend_on_the_batch(layout, heads, k):
    """The number of queries decides how many heads a CTA computes."""
    given = inputs(layout, 300, 1, heads, k, 1000, invalid=0.0)
    parts = [slice(0, 1), slice(100, 108), slice(7, 39), slice(200, 300)]
    assert_rows_stand_alone(CASE.run, given, ("q", "indices"), parts)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["656 bytes", "584 bytes"])
def test_bytes_by_other_names_give_the_same_bits(layout, dtype):
    given = inputs(layout, 2, 1, 64, 200, extra=(100, 16))
    caches = {name: given[name].view(dtype) for name, *_ in (FIRST, SECOND)}
    assert_same_bits(CASE.run(given | caches), CASE.run(given))


@pytest.mark.parametrize("style", ["planned in the graph", "planned before it", "no plan", "batch-invariant"])
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize(
    ("layout", "batch", "heads"), [("656 bytes", 3, 128), ("584 bytes", 40, 16), ("bf16, 576", 1, 64)]
)
def test_a_graph_takes_new_data(layout, batch, heads, into, style, record_error):
    def fresh(seed, low, high):
        options = {"invalid": 0.1, "sink": True, "seed": seed}
        counts = torch.randint(low, high, (2, batch), dtype=torch.int32, device="cuda")
        new = inputs(layout, batch, 2, heads, 700, extra=(300, 16), **options)
        return new | dict(zip(("topk_length", "extra_topk_length"), counts))

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
