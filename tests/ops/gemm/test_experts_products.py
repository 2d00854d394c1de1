"""The bridges of experts' products, of FP8 and of FP4 weights, on the CPU: dispatch, torch.compile, limits, and what
they launch."""

import re

import pytest
import torch

import dsa
from dsa import reference
from dsa.kernels.gemm import fp8_fp4_gemm_few_rows_sm90 as fp4_few_rows_kernels
from dsa.kernels.gemm import fp8_fp4_gemm_sm90 as fp4_kernels
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from dsa.kernels.gemm import limits
from dsa.ops.gemm import fp8_fp4_gemm_nt as fp4
from dsa.ops.gemm import fp8_gemm_nt as fp8
from dsa.ops.gemm import grouped_fp8_gemm_swiglu as swiglu
from dsa.ops.gemm import swiglu_cast_to_fp8 as cast

BRIDGES = fp4, fp8, swiglu, cast
E4M3 = torch.float8_e4m3fn
ENDS = torch.tensor([2, 2, 4], dtype=torch.int32)
ROWS = torch.tensor([4, 0, 0, 3], dtype=torch.int32)
OPS = {name: getattr(dsa, name) for name in dsa.__all__ if name.startswith("grouped_fp8") and name.count("fp4") < 2}


def operands(name, columns=256, channels=384, matrices=3):
    groups = -(-channels // 128)
    a = torch.randn(5, channels).to(E4M3), torch.rand(5, groups)
    if "fp4" not in name:
        return a, (torch.randn(matrices, columns, channels).to(E4M3), torch.rand(matrices, -(-columns // 128), groups))
    packed = torch.randint(-128, 128, (matrices, columns, channels // 2), dtype=torch.int8)
    scale = torch.randint(120, 128, (matrices, columns, channels // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return a, (packed, scale, dsa.fp4_block_scales(packed, scale))


def tensors(result):
    return result if isinstance(result, tuple) else (result,)


def same(got, expected):
    for x, y in zip(tensors(got), tensors(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def test_there_are_four():
    assert {name.replace("_fp4", "") for name in OPS} == {"grouped_fp8_gemm_nt", "grouped_fp8_gemm_swiglu"}
    assert len(OPS) == 4


@pytest.mark.parametrize("name", OPS)
def test_runs_the_reference_without_a_gpu(name):
    a, b = operands(name)
    same(OPS[name](a, b, ENDS, rows=ROWS), getattr(reference, name)(a, b, ENDS, rows=ROWS))


@pytest.mark.parametrize("name", OPS)
def test_is_one_node_of_a_compiled_graph(name):
    a, b = operands(name)

    def run(a, b, ends, rows):
        return OPS[name](a, b, ends, rows=rows)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    same(compiled(a, b, ENDS, ROWS), run(a, b, ENDS, ROWS))


@pytest.mark.parametrize("name", OPS)
def test_registration(name):
    # torch cannot compare float8 inputs before and after, as the schema's test does.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    a, b = operands(name)
    for rows in (None, ROWS):
        ends = ENDS if rows is not None else ENDS.clamp(max=2) + 3 * (torch.arange(3) == 2).int()
        options = (ends, rows, 2.0, True, torch.bfloat16) if "swiglu" in name else (ends, torch.float16, rows, None)
        torch.library.opcheck(getattr(torch.ops.dsa, name).default, (*a, *b, *options), test_utils=tests)


@pytest.mark.parametrize("name", OPS)
def test_what_the_kernels_do_not_take(name, kernel_path):
    a, b = operands(name)
    for wrong, message in [
        ((b[0].transpose(0, 1).contiguous().transpose(0, 1), *b[1:]), "b[0]: must be contiguous, got strides"),
        ((operands(name, matrices=1025, channels=128)[1]), "the kernel takes at most 1024 weights, got 1025"),
    ]:
        first = operands(name, channels=128)[0] if "1025" in message else a
        ends = torch.zeros(len(wrong[0]), dtype=torch.int32)
        with pytest.raises(ValueError, match=re.escape(message)):
            OPS[name](first, wrong, ends, rows=ROWS)
    rows = torch.zeros(1, dtype=torch.int32).expand(limits.MAX_ROWS + 1)
    with pytest.raises(ValueError, match="rows: the kernel takes at most 134217728 rows, got 134217729"):
        OPS[name](a, b, ENDS, rows=rows)


@pytest.mark.parametrize("columns, channels", [(12, 128), (256, 160)])
def test_shapes_of_fp4_weights(columns, channels, kernel_path):
    a, b = operands("fp4", columns=columns, channels=channels)
    message = (
        "b[0]: the kernel takes K that is a multiple of 128 and N of 8, got shape "
        f"[3, {columns}, {channels // 2}], of K / 2 bytes a row"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        dsa.grouped_fp8_fp4_gemm_nt(a, b, ENDS, rows=ROWS)


def test_casts_of_weights_are_pytorch():
    """On any device, and whatever the backend."""
    assert not {"fp4_block_scales", "widen_fp4"} & dsa.backends.KERNELS.keys()
    _, (packed, scale, block_scale) = operands("fp4")
    q, again = dsa.widen_fp4(packed, scale)
    assert torch.equal(again, block_scale) and q.shape == (3, 256, 384)


def padded(scales):
    """With rows of 16 bytes."""
    return torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))


def many(count, matrices):
    """(rows, ends) of so many rows of the five tokens, all the first matrix's."""
    ends = torch.full((matrices,), count, dtype=torch.int32)
    return torch.randint(0, 5, (count,), dtype=torch.int32), ends


def bytes_of(q):
    return q.view(torch.uint8)


def blocks_innermost(scales):
    """Scales [E, N / 128, K / 128] as [N / 128, G, E], a matrix's still one after the other."""
    return padded(scales).permute(1, 2, 0)


@pytest.mark.parametrize("limit", [None, 2.0])
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_what_the_kernel_of_products_and_swiglu_gets(limit, use_ue8m0, named_launches):
    (q, s), (w, ws) = operands("fp8")
    options = {"limit": limit, "use_ue8m0": use_ue8m0, "dtype": torch.float16}
    for rows, ends in ((ROWS, ENDS), (None, ENDS + 1)):
        out, scale = dsa.grouped_fp8_gemm_swiglu((q, s), (w, ws), ends, rows=rows, **options)
        name, variant, arguments = named_launches.pop()
        count = 5 if rows is None else 4
        sizes = count, 256, 384, 3, 132
        assert variant == (torch.float16, use_ue8m0, limit is not None, *sizes, rows is not None, False) and name == ""
        assert arguments[0] is q and torch.equal(arguments[1], padded(s)) and arguments[2] is rows
        assert arguments[3].shape == (3 * 256, 384) and arguments[3].data_ptr() == w.data_ptr()
        assert torch.equal(arguments[4], blocks_innermost(ws)) and torch.equal(arguments[5], ends)
        assert arguments[6] is out and arguments[7] is scale and arguments[8:] == (limit, None, 132)
        assert out.shape == (count, 128) and out.dtype == E4M3 and scale.shape == (count, 1)
    assert not named_launches


def test_rows_of_swiglu_that_are_gathered_copied_and_drawn(named_launches):
    (q, s), b = operands("fp8", matrices=2)
    for count, gathered, drawn in ((4096, True, False), (4097, False, True)):
        rows, ends = many(count, 2)
        rows[-1] = -7  # there is no such row
        dsa.grouped_fp8_gemm_swiglu((q, s), b, ends, rows=rows)
        _, variant, arguments = named_launches.pop()
        assert variant[-2:] == (gathered, drawn)
        assert (arguments[2] is rows) == gathered and (arguments[2] is None) == drawn
        inside = rows.clamp(0, 4)
        assert gathered or torch.equal(bytes_of(arguments[0]), bytes_of(q)[inside])
        assert gathered or torch.equal(arguments[1], padded(s)[inside])
        assert arguments[9] is None if gathered else arguments[9].tolist() == [0]


@pytest.mark.parametrize("name", ["grouped_fp8_gemm_swiglu", "grouped_fp8_fp4_gemm_swiglu"])
def test_swiglu_of_nothing(name, named_launches):
    """Without channels or matrices the sums are zero, and what becomes of zeros is the cast's."""
    a, b = operands(name)
    none = torch.zeros(3, dtype=torch.int32)
    out, scale = OPS[name](tuple(x[:0] for x in a), b, none)
    assert out.shape == (0, 128) and scale.shape == (0, 1) and not named_launches
    a = tuple(x[:, :0] for x in a)
    out, scale = OPS[name](a, tuple(x if x.dim() == 2 else x[..., :0] for x in b), ENDS + 1)
    [(_, _, arguments)] = named_launches
    assert out.shape == (5, 128) and scale.shape == (5, 1) and not arguments[0].any() and not arguments[1].any()


def test_what_the_kernel_of_few_rows_of_fp4_weights_gets(kernel_path, monkeypatch):
    found = []

    def few_rows_kernel(kernels, *variant):
        return lambda *arguments: found.append((variant, arguments)), 99

    monkeypatch.setattr(fp4, "_few_rows_kernel", few_rows_kernel)
    (q, s), (packed, scale, block_scale) = operands("fp4")
    weights = torch.rand(4)
    for rows, given in ((ROWS, weights), (ROWS, None), (None, None)):
        ends = ENDS if rows is ROWS else ENDS + 1
        out = dsa.grouped_fp8_fp4_gemm_nt((q, s), (packed, scale, block_scale), ends, rows=rows, weights=given)
        variant, arguments = found.pop()
        assert variant == (torch.bfloat16, len(out), 256, 384, 3, 132) and arguments[8] is out
        assert arguments[0] is q and torch.equal(arguments[1], padded(s)) and arguments[9] == 99
        # Neither rows nor weights: an empty tensor, as all have the same kernel.
        assert arguments[2] is rows if rows is ROWS else arguments[2].shape == (0,)
        assert arguments[7] is weights if given is weights else arguments[7].shape == (0,)
        assert arguments[3].shape == (768, 192) and arguments[3].data_ptr() == packed.data_ptr()
        assert arguments[4].shape == (3, 256, 16) and torch.equal(arguments[4][..., :12], scale.view(torch.uint8))
        assert torch.equal(arguments[5], padded(block_scale)) and torch.equal(arguments[6], ends)


@pytest.mark.parametrize("name", ["grouped_fp8_fp4_gemm_nt", "grouped_fp8_fp4_gemm_swiglu"])
@pytest.mark.parametrize("count, drawn", [(100, False), (1023, False), (1024, True)])
def test_what_the_kernels_of_many_rows_of_fp4_weights_get(name, count, drawn, named_launches):
    """Rows are copied, however many there are."""
    (q, s), (packed, scale, block_scale) = operands(name)
    rows, ends = many(count, 3)
    out = OPS[name]((q, s), (packed, scale, block_scale), ends, rows=rows)
    [(kind, variant, arguments)] = named_launches
    sizes = count, 256, 384, 3, 132
    if "swiglu" in name:
        assert kind == "fp4" and variant == (torch.bfloat16, True, False, *sizes, drawn)
        assert arguments[6] is out[0] and arguments[7] is out[1] and arguments[8] is None
    else:
        assert kind == "" and variant == (torch.bfloat16, *sizes, False, drawn)
        assert arguments[6] is out and arguments[7] is arguments[8] is None
    assert torch.equal(bytes_of(arguments[0]), bytes_of(q)[rows]) and torch.equal(arguments[1], padded(s)[rows])
    assert arguments[2].shape == (768, 192) and arguments[2].data_ptr() == packed.data_ptr()
    assert arguments[3].shape == (768, 16) and torch.equal(arguments[3][:, :12], scale.view(torch.uint8).flatten(0, 1))
    assert torch.equal(arguments[4], blocks_innermost(block_scale)) and torch.equal(arguments[5], ends)
    assert (arguments[9].tolist() == [0] if drawn else arguments[9] is None) and arguments[10] == 132


SIZES = [(columns, channels) for columns in (256, 4096) for channels in (128, 2048, 7168)]


@pytest.mark.parametrize("matrices", [1, 2, 256, limits.MAX_MATRICES])
@pytest.mark.parametrize("rows", [1, 24, 64, 65, 1024, 4096, 16384, 131072, limits.MAX_ROWS])
def test_only_shipped_variants_are_asked_for(rows, matrices, monkeypatch):
    of_swiglu, of_fp4, of_few = (
        [arguments for _, arguments in module.shipped_variants()]
        for module in (kernels, fp4_kernels, fp4_few_rows_kernels)
    )
    for module, compile_function in (
        (kernels, "compile_fp8_gemm_swiglu"),
        (fp4_kernels, "compile_fp8_fp4_gemm_swiglu"),
        (fp4_kernels, "compile_fp8_fp4_gemm"),
        (fp4_few_rows_kernels, "compile_fp8_fp4_gemm_few_rows"),
    ):
        monkeypatch.setattr(module, compile_function, lambda *arguments: arguments)
    drawn = fp8.draws(rows, matrices)
    for sizes in ((rows, *size, matrices, 132) for size in SIZES):
        kind = torch.bfloat16, True, False, *sizes
        assert swiglu._kernel.__wrapped__(kernels, *kind, False, drawn) in of_swiglu
        if rows <= kernels.GATHERED_ROWS:
            assert swiglu._kernel.__wrapped__(kernels, *kind, True, False) in of_swiglu
        if fp4.has_few_rows(rows, matrices):
            launch, ctas = fp4._few_rows_kernel.__wrapped__(fp4_few_rows_kernels, torch.float16, *sizes)
            assert launch in of_few and ctas > 0
        else:
            assert swiglu._fp4_kernel.__wrapped__(fp4_kernels, *kind, drawn) in of_fp4
            assert fp4._kernel.__wrapped__(fp4_kernels, torch.float16, *sizes, True, drawn) in of_fp4
