"""Test the products of `dsa.compat.deep_gemm` without a GPU: the references' results, and the arguments that kernels
would get on a GPU."""

import random

import pytest
import torch

import dsa
from dsa.cases.case import Maker
from dsa.cases.gemm import activations, blocks, dequantised, matrix
from dsa.compat import deep_gemm
from dsa.compat.deep_gemm.grouped import _aligned, _ends
from dsa.ops.gemm import fp8_gemm_nt as bridge
from dsa.testing import calc_diff
from tests.reference.common import BF16, E4M3, F32, INT32, NAN, assert_refused, i32, zeros

MAX_DIFF = 1e-3  # as in DeepGEMM's tests


def operands(rows, columns, channels, *groups):
    """Return (a, b), each (e4m3 values, scales). a has a scale per row and block of 128 channels. b has a scale per
    block of 128 x 128, and the leading dimension `groups`, if given."""
    new = Maker()
    b = new.e4m3(*groups, columns, channels), new.positive(*groups, blocks(columns), blocks(channels))
    return activations(new, rows, channels), b


def assert_product(d, a, b, rows=slice(None), group=...):
    expected = dequantised(*(x[rows] for x in a)) @ matrix([x[group] for x in b]).T
    assert d.numel() == 0 or calc_diff(d, expected) < MAX_DIFF


def column_major(scales):
    """Return the scales column-major, with columns padded to a multiple of 4 rows."""
    rows, columns = scales.shape[-2:]
    wide = scales.new_full((*scales.shape[:-2], columns, -(-rows // 4) * 4), NAN)
    wide[..., :rows] = scales.mT
    return wide.mT[..., :rows, :]


def aligned(sizes):
    return [-(-size // 128) * 128 for size in sizes]


def m_indices_of(sizes, filled=False):
    """Return the group of each row. Groups are padded to multiples of 128 rows. Rows of padding have -1, or with
    `filled` their group's number. Callers of DeepGEMM use both forms."""
    groups = torch.arange(len(sizes)).repeat_interleave(i32(aligned(sizes)))
    rows = torch.cat([torch.arange(rows) for rows in aligned(sizes)])
    return groups.where((rows < i32(sizes)[groups]) | filled, -1).int()


# Columns and channels are an eighth of those in DeepGEMM's `enumerate_normal`. 264 and 72 columns end with a partial
# block.
@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize(("columns", "channels"), [(264, 896), (72, 896), (896, 256)])
@pytest.mark.parametrize("layout", [torch.clone, column_major])
@pytest.mark.parametrize("weight_layout", [torch.clone, lambda scales: scales.T.contiguous().T])
@pytest.mark.parametrize(
    "options",
    [{}, {"recipe": (1, 128, 128), "compiled_dims": "mnk"}, {"recipe_a": (1, 128), "recipe_b": [128, 128]}],
)
def test_one_matrix_with_scales_and_results_of_any_layout(options, weight_layout, layout, columns, channels, rows):
    (q, s), (w, ws) = operands(rows, columns, channels)
    around = torch.full((rows, columns + 36), 7.0)
    d = around[:, 8 : columns + 8]
    assert deep_gemm.fp8_gemm_nt((q, layout(s)), (w, weight_layout(ws)), d, **options) is None
    assert torch.equal(d, dsa.fp8_gemm_nt((q, s), (w, ws), F32))
    assert (around[:, :8] == 7).all() and (around[:, columns + 8 :] == 7).all()


# (groups, expected rows per group, columns, channels) of DeepGEMM's `enumerate_m_grouped_contiguous`, reduced.
@pytest.mark.parametrize(("groups", "rows"), [(4, 256), (8, 128)])
@pytest.mark.parametrize(("columns", "channels"), [(384, 512), (448, 256), (256, 128)])
@pytest.mark.parametrize("layout", ["-1", "filled", "psum"])
def test_contiguous_groups(groups, rows, columns, channels, layout):
    sizes = [int(rows * random.uniform(0.7, 1.3)) for _ in range(groups)]
    padded, psum = aligned(sizes), layout == "psum"
    starts = [sum(padded[:e]) for e in range(groups)]
    (q, s), b = operands(sum(padded), columns, channels, groups)
    numbers = i32([x + y for x, y in zip(starts, sizes)]) if psum else m_indices_of(sizes, layout == "filled")
    given, scales, d = numbers.clone(), s.clone(), torch.full((len(q), columns), NAN, dtype=BF16)
    if psum:  # callers can leave the scales of rows of padding uninitialised
        scales[m_indices_of(sizes) < 0] = NAN
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((q, scales), b, d, numbers, use_psum_layout=psum)
    for e, start in enumerate(starts):
        part = slice(start, start + (sizes if psum else padded)[e])  # without psum, padding is multiplied as well
        assert_product(d[part], (q, s), b, part, e)
    assert torch.equal(numbers, given)


@pytest.mark.parametrize(
    ("m_indices", "ends"),
    [
        ([0, 0, -1, 2, 2, -1], [3, 3, 6, 6]),
        ([-1, -1, 1, 1], [2, 4, 4, 4]),
        ([-1, -1], [0, 0, 0, 0]),
        ([3, 3], [0, 0, 0, 2]),
        ([0, -1, -1, 0, 1], [4, 5, 5, 5]),
        # Wrong group numbers: the ends still do not decrease, and the last is at most the number of rows.
        ([2, 0, 1, 7, 0], [0, 0, 3, 3]),
        ([-(2**31), 2**31 - 1, 0], [1, 1, 1, 1]),
    ],
)
def test_ends_of_indices(m_indices, ends):
    assert _ends(torch.tensor(m_indices, dtype=INT32), 4).tolist() == ends


def test_groups_end_at_multiples_of_the_alignment():
    ends = torch.tensor([3, 128, 257, 600], dtype=INT32)
    assert _aligned(ends, 610).tolist() == [128, 128, 384, 610] and ends[0] == 3
    try:
        deep_gemm.set_mk_alignment_for_contiguous_layout(4)
        assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 4
        assert _aligned(ends, 610).tolist() == [4, 128, 260, 600]
        assert _ends(torch.tensor([0, 0, 1, 1, 1, -1, -1, -1, -1, -1]), 3).tolist() == [2, 8, 8]
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(128)


# (groups, maximum and expected rows per group, columns, channels) of DeepGEMM's `enumerate_m_grouped_masked`, reduced.
@pytest.mark.parametrize(("groups", "most", "rows"), [(8, 64, 24), (6, 128, 80), (6, 32, 2)])
@pytest.mark.parametrize(("columns", "channels"), [(384, 512), (256, 128)])
def test_masked_groups(groups, most, rows, columns, channels):
    sizes = [most + 9, -3, *(int(rows * random.uniform(0.7, 1.3)) for _ in range(groups - 2))]
    a, b = operands(groups * most, columns, channels, groups)
    q, s = (x.view(groups, most, -1) for x in a)
    d = torch.full((groups, most, columns), NAN, dtype=BF16)
    deep_gemm.m_grouped_fp8_gemm_nt_masked((q, column_major(s)), b, d, i32(sizes), rows)
    for e, size in enumerate(sizes):
        used = min(max(size, 0), most)
        assert_product(d[e, :used], a, b, slice(e * most, e * most + used), e)
        assert d[e, used:].isnan().all()


def row_scaled(rows, channels):
    a = activations(Maker(seed=rows), rows, channels)
    return a, dequantised(*a)


@pytest.mark.parametrize("recipe", [{"recipe": (1, 1, 128)}, {"recipe_a": (1, 128), "recipe_b": (1, 128)}])
@pytest.mark.parametrize("added", [None, "c", "d"])
def test_gradients_of_weights(added, recipe):
    (a, x), (b, w) = row_scaled(40, 200), row_scaled(24, 200)
    d, c = torch.full((40, 32), NAN)[:, :24], torch.randn(40, 24) * 32
    expected = x @ w.T if added is None else c + x @ w.T
    d = c.clone() if added == "d" else d
    deep_gemm.fp8_fp4_gemm_nt(a, b, d, {None: None, "c": c, "d": d}[added], **recipe)
    assert torch.allclose(d.double(), expected, rtol=1e-5, atol=1e-3)


def test_gradients_of_weights_of_groups():
    sizes, c = [256, 0, 128], torch.randn(3, 40, 24) * 32
    xs, ws = ([row_scaled(rows, size) for size in sizes] for rows in (40, 24))
    a, b = (
        (torch.cat([q.flatten() for (q, _), _ in parts]), torch.cat([s for (_, s), _ in parts], 1))
        for parts in (xs, ws)
    )
    d = c.clone()
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, sizes, i32(sizes), d)
    expected = torch.stack([x @ w.T for (_, x), (_, w) in zip(xs, ws)])
    assert torch.allclose(d.double(), c + expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("recipe", "is_sfa"), [((1, 128), None), ((1, 128, 128), True), ((1, 1, 128), False)])
def test_scales_of_rows_get_the_layout_of_hopper(recipe, is_sfa):
    rows = torch.rand(130, 3)
    found = deep_gemm.transform_sf_into_required_layout(rows, 130, 300, recipe, is_sfa=is_sfa)
    assert torch.equal(found, rows) and found.stride() == (1, 132)


def test_scales_of_weights_keep_their_layout():
    scales = torch.rand(2, 2, 3)
    assert deep_gemm.transform_sf_into_required_layout(scales, 200, 300, (1, 128, 128), 2, False) is scales
    assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(20) == 128


def test_nothing_to_multiply():
    (q, s), (w, ws) = operands(4, 256, 128, 2)
    d, wide = torch.ones(0, 256), torch.ones(4, 256)
    deep_gemm.fp8_gemm_nt((q[:0], s[:0]), (w[0], ws[0]), d)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((q[:0], s[:0]), (w, ws), d, i32([]))
    deep_gemm.fp8_gemm_nt((q[:, :0], s[:, :0]), (w[0, :, :0], ws[0, :, :0]), wide)
    assert (wide == 0).all()


def same(x, y):
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


@pytest.mark.parametrize(("rows", "kernel"), [(32, "fp8_gemm_few_rows"), (600, "fp8_gemm")])
def test_kernels_write_to_the_callers_tensor(rows, kernel, named_launches):
    (q, s), (w, ws) = operands(rows, 264, 128)
    d = zeros(rows, 272, dtype=BF16)[:, :264]
    deep_gemm.fp8_gemm_nt((q, s), (w, ws), d)
    [(name, _, call)] = named_launches
    assert name == kernel and same(call[0], q) and same(call[2], w) and same(call[4], d)


def test_kernels_write_contiguous_groups_to_the_callers_tensor(named_launches):
    (q, s), (w, ws) = operands(256, 264, 128, 3)
    d = zeros(256, 272, dtype=BF16)[:, :264]
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((q, s), (w, ws), d, m_indices_of([100, 0, 120]))
    [(name, _, call)] = named_launches
    assert name == "grouped_fp8_gemm" and same(call[0], q) and same(call[3], w.view(-1, 128)) and same(call[6], d)
    assert call[5].tolist() == [128, 128, 256]
    # The rows are neither gathered nor weighted, and there are too few of them for dynamic scheduling.
    assert call[2] is call[7] is call[8] is call[9] is None


def masked_call(expected, sizes=(5, 77)):
    a, b = operands(256, 264, 128, 2)
    a, d = tuple(x.view(2, 128, -1) for x in a), zeros(2, 128, 264, dtype=BF16)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, i32(sizes), expected)
    return a, b, d


def test_kernels_write_masked_groups_to_the_callers_tensor(named_launches):
    (q, _), (w, _), d = masked_call(40)
    for group, (name, _, call) in enumerate(named_launches):
        assert name == "grouped_fp8_gemm" and call[5].tolist() == [(5, 77)[group]]
        assert same(call[0], q[group]) and same(call[3], w[group]) and same(call[6], d[group])
    assert len(named_launches) == 2


@pytest.fixture
def rows_chosen_for(named_launches, monkeypatch):
    """Return a list of the `rows` of all calls of `_choose_grouped_config`."""
    found, choose = [], bridge._choose_grouped_config
    monkeypatch.setattr(bridge, "_choose_grouped_config", lambda rows, *more: found.append(rows) or choose(rows, *more))
    return found


@pytest.mark.parametrize(("expected", "chosen_for"), [(1, 1), (40, 40), (128, 128), (1000, 128)])
def test_tiles_of_masked_groups_are_chosen_for_the_expected_rows(expected, chosen_for, rows_chosen_for):
    """The operands have 128 rows per group, so the op expects at most 128 rows."""
    masked_call(expected)
    assert rows_chosen_for == [chosen_for] * 2


@pytest.mark.parametrize(("expected", "chosen_for"), [(None, 256), (40, 80), (1000, 256)])
def test_tiles_of_psum_groups_are_chosen_for_the_expected_rows(expected, chosen_for, rows_chosen_for):
    a, b = operands(256, 264, 128, 2)
    options = {"use_psum_layout": True, "expected_m_for_psum_layout": expected}
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, zeros(256, 264, dtype=BF16), i32([5, 133]), **options)
    assert rows_chosen_for == [chosen_for]


@pytest.mark.parametrize("kernels", [False, True])
def test_masked_groups_without_channels_are_zero(kernels, request):
    found = request.getfixturevalue("named_launches") if kernels else []
    a, b = (zeros(3, 8, 0, dtype=E4M3), zeros(3, 8, 0)), (zeros(3, 16, 0, dtype=E4M3), zeros(3, 1, 0))
    base = torch.full((3, 8, 32), 7.0)
    expected = base.clone()
    expected[0, :5, :16] = expected[2, :, :16] = 0
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, base[..., :16], i32([5, -3, 99]), 4)
    assert torch.equal(base, expected) and not found


def test_scales_of_masked_groups_are_aligned_once(named_launches):
    (q, s), b = operands(3 * 16, 256, 384, 3)
    a, d = (q.view(3, 16, -1), column_major(s.view(3, 16, -1))), zeros(3, 16, 256, dtype=BF16)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, i32([16] * 3), 16)
    scales, weight_scales = ([call[place] for _, _, call in named_launches] for place in (1, 4))
    for e in range(3):
        assert torch.equal(scales[e][:, :3], s.view(3, 16, 3)[e]) and scales[e].shape == (16, 4)
        assert torch.equal(weight_scales[e][:, :3, 0], b[1][e]) and weight_scales[e].shape == (2, 4, 1)
        assert scales[e].data_ptr() - scales[0].data_ptr() == e * 16 * 16
        assert weight_scales[e].data_ptr() - weight_scales[0].data_ptr() == e * 2 * 16


@pytest.mark.parametrize("rows", [16, 600])
def test_kernels_write_to_a_copy_of_a_result_that_they_do_not_take(rows, named_launches):
    d = torch.full((rows, 265), 3.0, dtype=BF16)[:, 1:]
    deep_gemm.fp8_gemm_nt(*operands(rows, 264, 128), d)
    out = named_launches[0][2][4]
    # Grouped products, which use the same code, do not write all rows. So the copy begins with the numbers of d. No
    # kernel runs here, and the copy is written back to d. So d must still be 3.
    assert out.is_contiguous() and out.shape == d.shape and (d == 3).all()


def test_wrong_arguments_are_refused():
    a, b = operands(8, 256, 128, 2)
    one, d, rows = (b[0][0], b[1][0]), zeros(8, 256, dtype=BF16), i32([0] * 8)
    packed, by_rows = zeros(8, 128).char(), {"recipe": (1, 1, 128)}
    flat, ones, f32 = (zeros(1024, dtype=E4M3), torch.ones(8, 1)), i32([1]), zeros(1, 8, 8)
    many, wide = tuple(t.view(2, 4, -1) for t in a), d.view(2, 4, 256)
    nt, k_grouped = deep_gemm.fp8_gemm_nt, deep_gemm.k_grouped_fp8_gemm_nt_contiguous
    contiguous, masked = deep_gemm.m_grouped_fp8_gemm_nt_contiguous, deep_gemm.m_grouped_fp8_gemm_nt_masked
    for call, message in [
        (lambda: nt(a, one, d, c=d), r"c: must be None with recipe \(1, 128, 128\) on Hopper, got Tensor"),
        (lambda: nt(a, one, d, alpha=2.0), "alpha: must be None on Hopper, got float"),
        (lambda: nt(a, one, d, recipe=(1, 1, 32)), r"recipe: must be \(1, 128, 128\) or \(1, 1, 128"),
        (lambda: nt(a, one, d, recipe_b=(1, 32)), r"recipe_a: must be \(1, 128\) with recipe_b on"),
        (lambda: nt(a, one, d, None, None, (1, 128), (1, 32)), r"recipe_b: must be \(128, 128\) or \("),
        (lambda: nt(a, one, d, recipe_a=(1, 128), **by_rows), "recipe_a: must be None with recipe"),
        (lambda: nt(a, (packed, one[1]), d), r"b\[0\]: dtype must be float8_e4m3fn.*, got FP4.* dsa.widen_fp4"),
        (lambda: nt(a, one, d.float(), **by_rows), r"b\[1\]: shape must be \[256, 1\], got \[2, 1\]"),
        (lambda: nt(a, a, d[:, :8], **by_rows), "d: dtype must be float32, got bfloat16"),
        (lambda: nt(a, a, f32[0], d, **by_rows), "c: dtype must be float32, got bfloat16"),
        (lambda: k_grouped(flat, flat, f32, [64], ones), r"ks_cpu\[0\]: must be a multiple of 128, got 64"),
        (lambda: k_grouped(flat, flat, f32, None, ones), "ks_cpu: must be 1 ints, one per group of d, got None"),
        (lambda: k_grouped(flat, flat, f32, [256], ones), r"a\[0\]: must be contiguous with 8 x 256"),
        (lambda: k_grouped(flat, flat, f32, [128], ones, use_psum_layout=True), "use_psum_layout: must be False"),
        (lambda: contiguous(a, b, d, rows, **by_rows), r"recipe: must be \(1, 128, 128\) on"),
        (lambda: contiguous(a, b, d, rows, expected_m_for_psum_layout=1), "expected_m_for_psum_layout: must be None"),
        (lambda: deep_gemm.transform_sf_into_required_layout(a[1], 8, 128, (1, 32)), r"recipe: must be \(1, 128\) or"),
        (lambda: nt(a, one, d, recipe=5), "recipe: must be a tuple of ints or None, got int"),
        (lambda: nt(a, one, d, recipe=(1, 128.0, 128)), r"recipe: must be .* got \(1, 128.0, 128\)"),
        (lambda: nt(a, one, d, recipe_b="128"), "recipe_b: must be a tuple of ints or None, got str"),
        (lambda: contiguous(a, b, d, rows, use_psum_layout=1), "use_psum_layout: must be True or False, got 1"),
        (lambda: deep_gemm.transform_sf_into_required_layout(a[1], 8, 128, None), r"recipe: must be .* got None"),
        (lambda: deep_gemm.transform_sf_into_required_layout(a[1], 8, 128, (1, 128), "2"), "num_groups: must be an"),
        (lambda: deep_gemm.get_tma_aligned_size(1, 3), "element_size: must divide 16, got 3"),
        (lambda: nt((packed, a[1]), one, d), r"a\[0\]: dtype must be float8_e4m3fn, got int8"),
        (lambda: nt((a[0], a[1].int()), one, d), r"a\[1\]: dtype must be float32, got int32"),
        (lambda: nt((a[0], a[1][:4]), one, d), r"a\[1\]: shape must be \[8, 1\] or \[8, 4\], got \[4, 1\]"),
        (lambda: nt(a, b, d), r"b\[0\]: shape must be \[N, K\], got \[2, 256, 128\]"),
        (
            lambda: nt(a, (a[0], one[1][:1]), a[0].view(BF16)[:, :8]),
            r"d: is written, must not share memory with a\[0\]",
        ),
        (lambda: nt(a, one, d[:, :128]), r"d: shape must be \[8, 256\], got \[8, 128\]"),
        (lambda: nt(a, one, d.int()), "d: dtype must be float32, bfloat16 or float16, got int32"),
        (lambda: nt(a, one, d.T.contiguous().T), "d: the last dimension must be contiguous"),
        (lambda: nt(a, one, d[:1].expand(8, 256)), "d: its numbers must not share memory"),
        (lambda: contiguous(a, b, d, rows[:4]), r"grouped_layout: shape must be \[8\]"),
        (lambda: contiguous(a, b, d, rows.long()), "grouped_layout: dtype must be int32"),
        (lambda: contiguous(a, b, d, rows + 2), "ascend from at least 0 to at most 1"),
        (lambda: contiguous(a, b, d, 1 - torch.arange(8, dtype=INT32)), "grouped_layout: the rows'"),
        (lambda: contiguous(a, b, d, rows, epilogue=1), "epilogue: must be None"),
        (lambda: contiguous(a, b, d, rows, use_psum_layout=True), r"must be \[2\]"),
        (lambda: masked(many, b, wide, rows[:2], 0), "expected_m: must be at least 1"),
        (lambda: masked(many, b, wide, rows, 1), r"masked_m: shape must be \[2\]"),
        (lambda: masked(a, b, wide, rows[:2], 1), r"a\[0\]: shape must be \[E, max M"),
        (lambda: masked(many, one, wide, rows[:2], 1), r"b\[0\]: shape must be \[2"),
        (lambda: nt(a[0], one, d), r"^a: must be a pair \(e4m3 values, fp32 scales\), got Tensor"),
    ]:
        assert_refused(message, call)
    assert not d.any() and not f32.any()


VALUES, MEMORY = torch.ones(8, 256).to(E4M3), torch.ones(8, 4)
SQUARE, WHOLE = torch.ones(8, 8), zeros(12, 8)


@pytest.mark.parametrize(
    ("scales", "d", "c", "message"),
    [
        (MEMORY[:, :2], MEMORY.view(-1)[:1].expand(8, 8), None, "d: "),
        (MEMORY[:, :2], torch.as_strided(MEMORY, (8, 8), (0, 1)), None, "d: "),
        (MEMORY[:, :2], WHOLE[:8], WHOLE[4:], "c: must be d itself or share no memory with d"),
        (SQUARE[:, :2], SQUARE, None, r"d: is written, must not share memory with a\[1\]"),
    ],
)
def test_a_gradient_that_overlaps_its_operands_is_refused(scales, d, c, message):
    operands = (VALUES, scales), (VALUES, MEMORY[:, 2:])
    assert_refused(message, deep_gemm.fp8_gemm_nt, *operands, d, c=c, recipe=(1, 1, 128))
