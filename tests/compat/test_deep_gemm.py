"""DeepGEMM's signatures over the references, and what they give to the kernels: on the CPU."""

import contextlib
import inspect
import random

import pytest
import torch

import dsa
from dsa.compat import deep_gemm
from dsa.compat.deep_gemm.grouped import _aligned, _ends
from dsa.ops.gemm import fp8_gemm_nt as bridge
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8
from dsa.runtime import backends, variants
from dsa.testing import calc_diff

BF16, E4M3, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
MAX_DIFF = 2e-3  # DeepGEMM's is half of it, for sums of more numbers
RECIPES = "recipe recipe_a recipe_b compiled_dims disable_ue8m0_cast"
SIGNATURES = {  # of 2.8.1
    "fp8_gemm_nt": f"a b d c {RECIPES} alpha epilogue",
    "m_grouped_fp8_gemm_nt_contiguous": f"a b d grouped_layout {RECIPES} use_psum_layout ensure_zero_padding "
    "expected_m_for_psum_layout epilogue",
    "m_grouped_fp8_gemm_nt_masked": f"a b d masked_m expected_m {RECIPES} epilogue",
    "k_grouped_fp8_gemm_nt_contiguous": "a b d ks_cpu grouped_layout c recipe compiled_dims use_psum_layout epilogue",
    "transform_sf_into_required_layout": "sf mn k recipe num_groups is_sfa disable_ue8m0_cast psum_layout",
}


def operands(rows, columns, channels, groups=None):
    """bf16 x and w, and both cast as DeepGEMM's tests do: rows by 128 channels, weights by 128 x 128."""
    many = () if groups is None else (groups,)
    x, w = torch.randn(rows, channels).to(BF16), torch.randn(*many, columns, channels).to(BF16)
    casts = [dsa.per_block_cast_to_fp8(matrix, False) for matrix in w.view(-1, columns, channels)]
    b = tuple(torch.stack(tensors).view(*many, *tensors[0].shape) for tensors in zip(*casts))
    return x, w, per_token_cast_to_fp8(x, False), b


def column_major(scales):
    """The layout of `get_mn_major_tma_aligned_tensor`: columns one after the other, each of a multiple of 4 rows."""
    rows, blocks = scales.shape[-2:]
    wide = scales.new_full((*scales.shape[:-2], blocks, -(-rows // 4) * 4), torch.nan)
    wide[..., :rows] = scales.mT
    return wide.mT[..., :rows, :]


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_and_signatures_are_those_of_deep_gemm(name):
    function = getattr(deep_gemm, name)
    assert " ".join(inspect.signature(function).parameters) == SIGNATURES[name]
    if name.startswith(("fp8_", "m_grouped_")):
        assert getattr(deep_gemm, name.replace("fp8_", "fp8_fp4_")) is function


def aligned(sizes):
    return [-(-size // 128) * 128 for size in sizes]


def m_indices_of(sizes, filled=False):
    """-1 in the padding to 128 rows, or its group's number, as some callers have it."""
    parts = [
        (group if filled or row < size else -1)
        for group, (size, rows) in enumerate(zip(sizes, aligned(sizes)))
        for row in range(rows)
    ]
    return torch.tensor(parts, dtype=INT32)


# Of DeepGEMM's `enumerate_normal`, an eighth of columns and channels: the first two end with a smaller block.
@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize(("columns", "channels"), [(264, 896), (72, 896), (896, 256)])
def test_one_matrix(rows, columns, channels):
    x, w, a, b = operands(rows, columns, channels)
    d = torch.full((rows, columns), torch.nan, dtype=BF16)
    assert deep_gemm.fp8_gemm_nt(a, b, d) is None
    assert calc_diff(d, x.float() @ w.float().T) < MAX_DIFF
    assert torch.equal(d, dsa.fp8_gemm_nt(a, b))


def test_scales_in_either_layout_and_a_result_of_any_stride():
    _, _, (q, s), (weight, ws) = operands(130, 264, 384)
    expected = dsa.fp8_gemm_nt((q, s), (weight, ws), torch.float32)
    around = torch.full((130, 300), 7.0)
    for scales in (s, column_major(s)):
        for weight_scales in (ws, ws.T.contiguous().T):
            d = around.clone()[:, 8:272]
            deep_gemm.fp8_gemm_nt((q, scales), (weight, weight_scales), d, recipe=(1, 128, 128), compiled_dims="mnk")
            assert torch.equal(d, expected)
            base = d._base
            assert (base[:, :8] == 7).all() and (base[:, 272:] == 7).all()
    deep_gemm.fp8_gemm_nt((q, s), (weight, ws), d.zero_(), recipe_a=(1, 128), recipe_b=[128, 128])
    assert torch.equal(d, expected)


# (groups, expected rows of each, columns, channels) of `enumerate_m_grouped_contiguous`, small.
@pytest.mark.parametrize(("groups", "rows"), [(4, 256), (8, 128)])
@pytest.mark.parametrize(("columns", "channels"), [(384, 512), (448, 256), (256, 128)])
@pytest.mark.parametrize("layout", ["-1", "filled", "psum"])
def test_contiguous_groups(groups, rows, columns, channels, layout):
    sizes = [int(rows * random.uniform(0.7, 1.3)) for _ in range(groups)]
    padded = aligned(sizes)
    x, w, (q, s), b = operands(sum(padded), columns, channels, groups)
    starts = [sum(padded[:e]) for e in range(groups)]
    valid = torch.cat([torch.arange(start, start + size) for start, size in zip(starts, sizes)])
    ends = torch.tensor([start + size for start, size in zip(starts, sizes)], dtype=INT32)
    numbers = ends if layout == "psum" else m_indices_of(sizes, layout == "filled")
    if layout == "psum":  # what lies between the groups was never written
        poison = torch.full_like(s, torch.nan)
        poison[valid] = s[valid]
        s = poison
    d = torch.full((len(q), columns), torch.nan, dtype=BF16)
    given = numbers.clone()
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((q, s), b, d, numbers, use_psum_layout=layout == "psum")
    for e, (start, size) in enumerate(zip(starts, sizes)):
        part = slice(start, start + (size if layout == "psum" else padded[e]))  # padding has its products, too
        assert calc_diff(d[part], x[part].float() @ w[e].float().T) < MAX_DIFF
    assert torch.equal(numbers, given)


@pytest.mark.parametrize(
    ("m_indices", "ends"),
    [
        ([0, 0, -1, 2, 2, -1], [3, 3, 6, 6]),
        ([-1, -1, 1, 1], [2, 4, 4, 4]),
        ([-1, -1], [0, 0, 0, 0]),
        ([3, 3], [0, 0, 0, 2]),
        ([0, -1, -1, 0, 1], [4, 5, 5, 5]),
        # Of callers who say what is not so: no ends outside the rows, and none that decrease.
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


# (groups, rows of a group at most, expected rows, columns, channels) of `enumerate_m_grouped_masked`, small.
@pytest.mark.parametrize(("groups", "most", "rows"), [(8, 64, 24), (6, 128, 80), (6, 32, 2)])
@pytest.mark.parametrize(("columns", "channels"), [(384, 512), (256, 128)])
def test_masked_groups(groups, most, rows, columns, channels):
    sizes = [int(rows * random.uniform(0.7, 1.3)) for _ in range(groups)]
    sizes[1] = 0
    x, w, a, b = operands(groups * most, columns, channels, groups)
    q, s = (t.view(groups, most, -1) for t in a)
    d = torch.full((groups, most, columns), torch.nan, dtype=BF16)
    deep_gemm.m_grouped_fp8_gemm_nt_masked((q, column_major(s)), b, d, torch.tensor(sizes, dtype=INT32), rows)
    for e, size in enumerate(sizes):
        expected = x.view(groups, most, -1)[e, :size].float() @ w[e].float().T
        assert size == 0 or calc_diff(d[e, :size], expected) < MAX_DIFF
        assert d[e, size:].isnan().all()
    odd = torch.tensor([most + 9, -3, *sizes[2:]], dtype=INT32)
    deep_gemm.m_grouped_fp8_gemm_nt_masked((q, s), b, d.fill_(torch.nan), odd, rows)
    assert not d[0].isnan().any() and d[1].isnan().all()


def row_scaled(rows, channels):
    """e4m3 values with a scale per row and 128 channels, and what they stand for in fp64."""
    q, s = torch.randn(rows, channels).to(E4M3), torch.rand(rows, -(-channels // 128)) + 0.5
    x = q.double()
    for g in range(s.shape[1]):
        x[:, 128 * g : 128 * (g + 1)] *= s[:, g, None]
    return (q, s), x


@pytest.mark.parametrize("recipe", [{"recipe": (1, 1, 128)}, {"recipe_a": (1, 128), "recipe_b": (1, 128)}])
def test_gradients_of_weights(recipe):
    (a, x), (b, w) = row_scaled(40, 200), row_scaled(24, 200)
    c, d = torch.randn(40, 24) * 32, torch.full((40, 32), torch.nan)[:, :24]
    deep_gemm.fp8_fp4_gemm_nt(a, b, d, **recipe)
    assert torch.allclose(d.double(), x @ w.T, atol=1e-4)
    deep_gemm.fp8_fp4_gemm_nt(a, b, d, c, **recipe)
    assert torch.allclose(d.double(), c + x @ w.T, atol=1e-4)
    deep_gemm.fp8_fp4_gemm_nt(a, b, c, c, **recipe)
    assert torch.equal(c, d)


def test_gradients_of_weights_of_groups():
    sizes, c = [256, 0, 128], torch.randn(3, 40, 24) * 32
    xs, ws = ([row_scaled(rows, size) for size in sizes] for rows in (40, 24))
    a, b = (
        (torch.cat([q.flatten() for (q, _), _ in parts]), torch.cat([s for (_, s), _ in parts], 1))
        for parts in (xs, ws)
    )
    d = c.clone()
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, sizes, torch.tensor(sizes, dtype=INT32), d)
    for e in range(3):
        assert torch.allclose(d[e].double(), c[e] + xs[e][1] @ ws[e][1].T, atol=1e-4)


def test_scales_in_the_layout_of_hopper():
    rows, blocks = torch.rand(130, 3), torch.rand(2, 2, 3)
    transform = deep_gemm.transform_sf_into_required_layout
    for recipe, is_sfa in (((1, 128), None), ((1, 128, 128), True), ((1, 1, 128), False)):
        found = transform(rows, 130, 300, recipe, is_sfa=is_sfa)
        assert torch.equal(found, rows) and found.stride() == (1, 132)
    assert transform(blocks, 200, 300, (1, 128, 128), 2, False) is blocks
    assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(20) == 128


def test_nothing_to_multiply():
    _, _, (q, s), b = operands(4, 256, 128, 2)
    d = torch.full((0, 256), 1.0)
    deep_gemm.fp8_gemm_nt((q[:0], s[:0]), (b[0][0], b[1][0]), d)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((q[:0], s[:0]), b, d, torch.zeros(0, dtype=INT32))
    wide = torch.ones(4, 256)
    no_channels = (b[0][0, :, :0], b[1][0, :, :0])
    deep_gemm.fp8_gemm_nt((q[:, :0], s[:, :0]), no_channels, wide)
    assert (wide == 0).all()


@pytest.fixture
def launches(monkeypatch):
    """What would be launched, (NAME, variant, arguments) each for the variant of compile_NAME. Nothing runs."""
    found = []

    def stand_in(variant):
        name = variant.function.removeprefix("compile_")
        return lambda *arguments: found.append((name, variant.arguments, arguments))

    monkeypatch.setattr(backends, "runs_kernel", lambda *_: True)
    monkeypatch.setattr(backends, "arch_of", lambda _: "sm_90")
    monkeypatch.setattr(backends, "on_device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(variants, "stand_in", stand_in)
    return found


def same(x, y):
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


@pytest.mark.parametrize("rows", [32, 600])
def test_kernels_write_to_what_the_caller_gives(rows, launches):
    _, _, (q, s), (w, ws) = operands(rows, 264, 128, 3)
    d = torch.zeros(rows, 272, dtype=BF16)[:, :264]
    deep_gemm.fp8_gemm_nt((q, s), (w[0], ws[0]), d)
    [(name, _, one)] = launches
    assert name == ("fp8_gemm_few_rows" if rows == 32 else "fp8_gemm")
    assert same(one[0], q) and same(one[2], w[0]) and same(one[4], d)


def test_kernels_write_groups_to_what_the_caller_gives(launches):
    _, _, (q, s), (w, ws) = operands(256, 264, 128, 3)
    d = torch.zeros(256, 272, dtype=BF16)[:, :264]
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((q, s), (w, ws), d, m_indices_of([100, 0, 120]))
    [(name, _, groups)] = launches
    assert name == "grouped_fp8_gemm" and same(groups[0], q) and same(groups[3], w.view(-1, 128)) and same(groups[6], d)
    assert groups[5].tolist() == [128, 128, 256]
    # Rows are not gathered or weighted, and so few of them are not drawn.
    assert groups[2] is groups[7] is groups[8] is groups[9] is None
    launches.clear()
    q, s, d = (t.view(2, 128, -1) for t in (q, s, torch.zeros(256, 264, dtype=BF16)))
    masked = torch.tensor([5, 77], dtype=INT32)
    deep_gemm.m_grouped_fp8_gemm_nt_masked((q, s), (w[:2], ws[:2]), d, masked, 40)
    assert [name for name, *_ in launches] == ["grouped_fp8_gemm"] * 2
    first, second = (call for *_, call in launches)
    assert first[5].tolist() == [5] and second[5].tolist() == [77]
    assert same(second[0], q[1]) and same(second[3], w[1]) and same(second[6], d[1])


@pytest.fixture
def rows_chosen_for(launches, monkeypatch):
    """The rows that tiles of grouped products are chosen for."""
    found, choose = [], bridge._choose_grouped_config
    monkeypatch.setattr(bridge, "_choose_grouped_config", lambda rows, *more: found.append(rows) or choose(rows, *more))
    return found


@pytest.mark.parametrize(("expected", "chosen_for"), [(1, 1), (40, 40), (128, 128), (1000, 128)])
def test_tiles_of_masked_groups_are_chosen_for_the_expected_rows(expected, chosen_for, rows_chosen_for):
    """Of each group; all its rows where more are expected."""
    _, _, (q, s), b = operands(256, 264, 128, 2)
    d = torch.zeros(2, 128, 264, dtype=BF16)
    a = q.view(2, 128, -1), s.view(2, 128, -1)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, torch.tensor([5, 77], dtype=INT32), expected)
    assert rows_chosen_for == [chosen_for] * 2


def test_tiles_of_psum_groups_are_chosen_for_the_expected_rows(rows_chosen_for):
    _, _, a, b = operands(256, 264, 128, 2)
    d, ends = torch.zeros(256, 264, dtype=BF16), torch.tensor([5, 133], dtype=INT32)
    for expected in (None, 40, 1000):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            a, b, d, ends, use_psum_layout=True, expected_m_for_psum_layout=expected
        )
    assert rows_chosen_for == [256, 80, 256]


@pytest.mark.parametrize("kernels", [False, True])
def test_masked_groups_without_channels(kernels, request):
    """Rows that count are zero; padding rows stay as they were."""
    found = request.getfixturevalue("launches") if kernels else []
    a = torch.zeros(3, 8, 0).to(E4M3), torch.zeros(3, 8, 0)
    b = torch.zeros(3, 16, 0).to(E4M3), torch.zeros(3, 1, 0)
    base = torch.full((3, 8, 32), 7.0)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, base[..., :16], torch.tensor([5, -3, 99], dtype=INT32), 4)
    assert (base[0, :5, :16] == 0).all() and (base[0, 5:] == 7).all() and (base[1] == 7).all()
    assert (base[2, :, :16] == 0).all() and (base[..., 16:] == 7).all() and not found


def test_scales_of_masked_groups_are_aligned_once(launches):
    """Their groups' are then parts of one tensor, which the kernel takes as they are."""
    _, _, (q, s), b = operands(3 * 16, 256, 384, 3)
    d = torch.zeros(3, 16, 256, dtype=BF16)
    a = q.view(3, 16, -1), column_major(s.view(3, 16, -1))
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, torch.full((3,), 16, dtype=INT32), 16)
    scales, of_weights = ([call[place] for _, _, call in launches] for place in (1, 4))
    for e in range(3):
        assert torch.equal(scales[e][:, :3], s.view(3, 16, 3)[e]) and scales[e].shape == (16, 4)
        assert torch.equal(of_weights[e][:, :3, 0], b[1][e]) and of_weights[e].shape == (2, 4, 1)
        assert scales[e].data_ptr() - scales[0].data_ptr() == e * 16 * 16
        assert of_weights[e].data_ptr() - of_weights[0].data_ptr() == e * 2 * 16


@pytest.mark.parametrize("rows", [16, 600])
def test_kernels_leave_a_result_that_they_cannot_write_to_a_copy(rows, launches):
    _, _, a, (w, ws) = operands(rows, 264, 128)
    d = torch.full((rows, 265), 3.0, dtype=BF16)[:, 1:]
    deep_gemm.fp8_gemm_nt(a, (w, ws), d)
    out = launches[0][2][4]
    assert out.is_contiguous() and out.shape == d.shape
    assert (d == 3).all()  # with what was there where no row is written


def test_what_is_refused():
    _, _, a, b = operands(8, 256, 128, 2)
    one, d, rows = (b[0][0], b[1][0]), torch.zeros(8, 256, dtype=BF16), torch.zeros(8, dtype=INT32)
    packed, by_rows = torch.zeros(8, 128, dtype=torch.int8), {"recipe": (1, 1, 128)}
    flat, ones, f32 = (torch.zeros(1024).to(E4M3), torch.ones(8, 1)), torch.ones(1, dtype=INT32), torch.zeros(1, 8, 8)
    many = tuple(t.view(2, 4, -1) for t in a)
    nt, k_grouped = deep_gemm.fp8_gemm_nt, deep_gemm.k_grouped_fp8_gemm_nt_contiguous
    contiguous, masked = deep_gemm.m_grouped_fp8_gemm_nt_contiguous, deep_gemm.m_grouped_fp8_gemm_nt_masked
    wide = d.view(2, 4, 256)
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
        (lambda: contiguous(a, b, d, rows, use_psum_layout=1), "use_psum_layout: must be True or False, got int"),
        (lambda: deep_gemm.transform_sf_into_required_layout(a[1], 8, 128, None), r"recipe: must be .* got None"),
        (lambda: deep_gemm.transform_sf_into_required_layout(a[1], 8, 128, (1, 128), "2"), "num_groups: must be an"),
        (lambda: deep_gemm.get_tma_aligned_size(1, 3), "element_size: must divide 16, got 3"),
        (lambda: nt((packed, a[1]), one, d), r"a\[0\]: dtype must be float8_e4m3fn, got int8"),
        (lambda: nt((a[0], a[1].int()), one, d), r"a\[1\]: dtype must be float32, got int32"),
        (lambda: nt((a[0], a[1][:4]), one, d), r"a\[1\]: shape must be \[8, 1\], got \[4, 1\]"),
        (lambda: nt(a, b, d), r"b\[0\]: shape must be \[N, K\], got \[2, 256, 128\]"),
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
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    with pytest.raises(TypeError, match=r"^a: must be a pair \(e4m3 values, fp32 scales\), got Tensor"):
        nt(a[0], one, d)
    assert not d.any() and not f32.any()


def test_a_gradient_that_overlaps_what_it_is_made_of_is_refused():
    values, memory = torch.ones(8, 256).to(torch.float8_e4m3fn), torch.ones(8, 4)
    operands = (values, memory[:, :2]), (values, memory[:, 2:])
    for d in (memory.view(-1)[:1].expand(8, 8), torch.as_strided(memory, (8, 8), (0, 1))):
        with pytest.raises(ValueError, match=r"d: "):
            deep_gemm.fp8_gemm_nt(*operands, d, recipe=(1, 1, 128))
    whole = torch.zeros(12, 8)
    with pytest.raises(ValueError, match="c: must be d itself or share no memory with d"):
        deep_gemm.fp8_gemm_nt(*operands, whole[:8], c=whole[4:], recipe=(1, 1, 128))
    square = torch.ones(64).view(8, 8)
    with pytest.raises(ValueError, match=r"d: is written, must not share memory with a\[1\]"):
        deep_gemm.fp8_gemm_nt((values, square[:, :2]), operands[1], square, recipe=(1, 1, 128))
