"""The bridge of the scaled products, on the CPU: what it launches, what it refuses, and what it remembers."""

import pytest
import torch

import dsa
from dsa.kernels.gemm import limits
from dsa.ops.gemm import fp8_gemm_nt as op

E4M3 = torch.float8_e4m3fn


def operands(rows=6, columns=136, channels=256, matrices=None, leading=()):
    """a, b: of `matrices` weights, or of one."""
    many = () if matrices is None else (matrices,)
    groups = -(-channels // 128)
    a = torch.randn(*leading, rows, channels).to(E4M3), torch.rand(*leading, rows, groups)
    return a, (torch.randn(*many, columns, channels).to(E4M3), torch.rand(*many, -(-columns // 128), groups))


def same(x, y):
    return x.data_ptr() == y.data_ptr() and x.dtype == y.dtype


@pytest.mark.parametrize("leading", [(), (2,), (3, 2)])
def test_what_the_kernel_gets(leading, launches):
    (q, s), (w, ws) = operands(leading=leading)
    s4, ws4 = (torch.nn.functional.pad(x, (0, 2)) for x in (s, ws))
    out = dsa.fp8_gemm_nt((q, s), (w, ws), torch.float32)
    assert out.shape == (*leading, 6, 136) and out.dtype == torch.float32 and out.is_contiguous()
    [(variant, (rows, scales, weight, weight_scales, ends, flat, multiprocessors))] = launches
    count = out.numel() // 136
    assert variant == (torch.float32, count, 136, 1, 132) and multiprocessors == 132
    assert rows.shape == (count, 256) and same(rows, q) and weight.shape == (136, 256) and same(weight, w)
    # Rows of scales are padded to 16 bytes.
    assert torch.equal(scales, s4.view(count, 4)) and torch.equal(weight_scales, ws4[None])
    assert ends.tolist() == [2**31 - 1] and flat.shape == (count, 136) and same(flat, out)


def test_what_the_grouped_kernel_gets(launches):
    (q, s), (w, ws) = operands(channels=512, matrices=3)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    out = dsa.grouped_fp8_gemm_nt((q, s), (w, ws), ends)
    [(variant, (rows, scales, weight, weight_scales, passed, flat, _))] = launches
    assert variant == (torch.bfloat16, 6, 136, 3, 132) and flat is out and out.shape == (6, 136)
    assert rows is q and scales is s and weight_scales is ws and passed is ends
    assert weight.shape == (3 * 136, 512) and same(weight, w)


def test_rows_that_the_kernel_cannot_read_are_copied(launches):
    (q, s), b = operands(channels=64)
    wide = torch.zeros(6, 72, dtype=torch.uint8)
    wide[:, :64] = q.view(torch.uint8)
    dsa.fp8_gemm_nt((wide.view(E4M3)[:, :64], s), b)
    rows = launches[0][1][0]
    assert rows.is_contiguous() and torch.equal(rows.view(torch.uint8), q.view(torch.uint8))


def test_nothing_to_multiply_launches_nothing(launches):
    for shape in ({"rows": 0, "columns": 7}, {"columns": 0}, {"channels": 0, "columns": 7}):
        a, b = operands(**shape)
        out = dsa.fp8_gemm_nt(a, b)
        assert out.shape == (shape.get("rows", 6), shape.get("columns", 136)) and not out.any()
        a, b = operands(**shape, matrices=2)
        assert dsa.grouped_fp8_gemm_nt(a, b, torch.zeros(2, dtype=torch.int32)).shape == out.shape
    assert not launches


def test_what_the_kernel_does_not_take(launches):
    a, (w, ws) = operands()
    wide = torch.zeros(136, 272, dtype=torch.uint8).view(E4M3)[:, :256]
    shifted = torch.zeros(136 * 256 + 8, dtype=torch.uint8)[8:].view(136, 256).view(E4M3)
    many = torch.zeros(1, 256, dtype=torch.uint8).view(E4M3).expand(limits.MAX_ROWS + 1, 256)
    multiples = r"b\[0\]: the kernel takes K that is a multiple of 16 and N of 8, got \[N, K\] = "
    for first, second, message in [
        (*operands(columns=130), multiples + r"\[130, 256\]"),
        (*operands(channels=100), multiples + r"\[136, 100\]"),
        (a, (wide, ws), r"b\[0\]: must be contiguous, got strides \[272, 1\]"),
        (a, (shifted, ws), r"b\[0\]: must start at a multiple of 16 bytes, got an address 8 past one"),
        ((many, torch.ones(1, 2).expand(len(many), 2)), (w, ws), r"a\[0\]: the kernel takes at most 134217728 rows"),
        ((a[0].to("meta"), a[1]), (w, ws), r"a\[0\]: must be on b\[0\]'s device cpu, got meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            dsa.fp8_gemm_nt(first, second)
    a, b = operands(rows=1, columns=8, channels=16, matrices=limits.MAX_MATRICES + 1)
    with pytest.raises(ValueError, match=r"b\[0\]: the kernel takes at most 1024 weights, got 1025"):
        dsa.grouped_fp8_gemm_nt(a, b, torch.zeros(1025, dtype=torch.int32))
    assert not launches


def test_each_is_one_node_of_a_compiled_graph():
    a, b = operands()
    c, d = operands(matrices=2)
    ends = torch.tensor([4, 6], dtype=torch.int32)

    def run(a, b, c, d, ends):
        return dsa.fp8_gemm_nt(a, b), dsa.grouped_fp8_gemm_nt(c, d, ends, torch.float32)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(a, b, c, d, ends), run(a, b, c, d, ends)):
        assert torch.equal(got, expected)


def test_registration():
    # torch cannot compare float8 inputs before and after, as the schema's test does.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    (a, b), (c, d) = operands(leading=(2,)), operands(matrices=2)
    torch.library.opcheck(torch.ops.dsa.fp8_gemm_nt.default, (*a, *b, torch.float16), test_utils=tests)
    ends = torch.tensor([4, 6], dtype=torch.int32)
    torch.library.opcheck(torch.ops.dsa.grouped_fp8_gemm_nt.default, (*c, *d, ends, torch.float32), test_utils=tests)


def test_operands_are_pairs():
    a, b = operands()
    for first, second, name in ((a[0], b, "a"), (a, b[0], "b"), ((*a, a[1]), b, "a")):
        with pytest.raises(TypeError, match=rf"^{name}: must be a pair \(e4m3 values, fp32 scales\), got"):
            dsa.fp8_gemm_nt(first, second)


@pytest.fixture(autouse=True)
def capturing(monkeypatch):
    """Says whether a graph is being captured, which torch cannot without CUDA; nothing is remembered yet."""
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    monkeypatch.setattr(op, "_known_ends", {})
    return state


def test_what_a_capture_makes_is_not_kept(capturing):
    """A tensor of a graph that is never replayed holds anything: no other call may read it."""
    capturing[0] = True
    captured = op._all_rows(torch.device("cpu"))
    capturing[0] = False
    ends = op._all_rows(torch.device("cpu"))
    assert ends is not captured and ends.tolist() == [2**31 - 1]
    assert op._all_rows(torch.device("cpu")) is ends


def test_a_capture_uses_what_is_there(capturing):
    ends = op._all_rows(torch.device("cpu"))
    capturing[0] = True
    assert op._all_rows(torch.device("cpu")) is ends
