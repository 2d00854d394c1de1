"""The bridges of sparse MLA attention on the CPU: dispatch, what they launch, torch.compile, and errors with a name."""

import math
import warnings

import pytest
import torch

import dsa
from dsa import backends, reference

D_V = 512


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def prefill_inputs(s_q=3, h_q=4, d=576, s_kv=20, k=7, dtype=torch.bfloat16):
    q, kv = torch.randn(s_q, h_q, d).to(dtype), torch.randn(s_kv, 1, d).to(dtype)
    return q, kv, torch.randint(-3, s_kv + 3, (s_q, 1, k), dtype=torch.int32), d**-0.5


def decode_inputs(kind="bfloat16", s_q=2, h_q=4, d=576, pages=5, page_size=6, k=9):
    """q, cache and indices of three sequences."""
    q, kv = torch.randn(3, s_q, h_q, d).bfloat16(), torch.randn(pages * page_size, d)
    if kind == "bytes":
        cache = torch.zeros(pages, page_size, 1, 656, dtype=torch.uint8)
        cache = cache if d == 576 else reference.make_v4_cache(pages, page_size)
    else:
        cache = torch.zeros(pages, page_size, 1, d, dtype=getattr(torch, kind))
    reference.write_kv_cache(kv, cache, torch.arange(pages * page_size))
    return q, cache, torch.randint(-3, pages * page_size + 3, (3, s_q, k), dtype=torch.int32)


def decoded(q, cache, indices, meta=None, **options):
    fp8 = cache.element_size() == 1
    return dsa.flash_mla_with_kvcache(q, cache, None, None, D_V, meta, is_fp8_kvcache=fp8, indices=indices, **options)


def assert_same(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype) and torch.equal(x, y)


@pytest.fixture
def launches(named_launches):
    return named_launches


@pytest.mark.parametrize(("heads", "head_tile"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (128, 64)])
def test_few_heads_have_a_kernel_of_their_own(launches, heads, head_tile):
    arguments = prefill_inputs(h_q=heads)
    dsa.flash_mla_sparse_fwd(*arguments)
    ((_, variant, (q, *_)),) = launches
    assert variant == (torch.bfloat16, 576, head_tile, 1, True) and q.shape[1] == heads


def test_what_prefill_launches(launches):
    q, kv, indices, scale = prefill_inputs(s_q=300, h_q=80, k=130)
    sink, length = torch.randn(80), torch.full((300,), 100, dtype=torch.int32)
    out, max_logits, lse = dsa.flash_mla_sparse_fwd(q, kv, indices, scale, 512, sink, length)
    [(name, variant, arguments)] = launches
    assert (name, variant) == ("attend", (torch.bfloat16, 576, 64, 1, True))
    q_, [cache], [index], [counts], counted, sinks, has_sink, out_, lse_, *_, max_, scale_, s_q = arguments[:-3]
    assert q_.shape == (300, 80, 576) and cache.shape == (20, 1, 576) and index.shape == (300, 1, 130)
    assert counts.data_ptr() == length.data_ptr() and counted == 1
    assert sinks.data_ptr() == sink.data_ptr() and has_sink == 1
    assert (out_.data_ptr(), lse_.data_ptr(), max_.data_ptr()) == tuple(x.data_ptr() for x in (out, lse, max_logits))
    assert scale_ == pytest.approx(scale * math.log2(math.e)) and s_q == 1 and arguments[-3:] == (66, 5, 0)


def head_slice(*shape, dtype=torch.bfloat16):
    """A part of a tensor with more heads, filled with 7; and the whole."""
    *rows, heads, d = shape
    whole = torch.full((*rows, heads + 4, d), 7.0, dtype=dtype)
    return whole[..., 1 : 1 + heads, :], whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_prefill_into_a_part_of_a_tensor(dtype):
    arguments = prefill_inputs(dtype=dtype)
    expected = dsa.flash_mla_sparse_fwd(*arguments)
    out, whole = head_slice(3, 4, D_V, dtype=dtype)
    got = dsa.flash_mla_sparse_fwd(*arguments, out=out)
    assert got[0] is out and torch.equal(out, expected[0])
    assert_same(got[1:], expected[1:])
    assert (whole[:, :1] == 7).all() and (whole[:, 5:] == 7).all()
    *rest, scale = arguments
    got = dsa.flash_mla_sparse_fwd(rest[0], rest[1][:0], rest[2], scale, out=out)
    assert not out.any() and (got[2] == math.inf).all() and (whole[:, :1] == 7).all() and (whole[:, 5:] == 7).all()


@pytest.mark.parametrize(("kind", "d"), [("bfloat16", 576), ("bytes", 576), ("bytes", 512)])
def test_decode_into_a_part_of_a_tensor(kind, d):
    q, cache, indices = decode_inputs(kind, d=d)
    expected = decoded(q, cache, indices)
    assert expected[1].shape == (3, 4, 2) and expected[1].transpose(1, 2).is_contiguous()
    out, whole = head_slice(3, 2, 4, D_V)
    got = decoded(q, cache, indices, out=out)
    assert got[0] is out and torch.equal(out, expected[0])
    assert_same(got[1:], expected[1:])
    assert (whole[..., :1, :] == 7).all() and (whole[..., 5:, :] == 7).all()


def test_what_the_kernels_get_of_an_out(launches):
    *arguments, scale = prefill_inputs()
    out, _ = head_slice(3, 4, D_V)
    got, max_logits, lse = dsa.flash_mla_sparse_fwd(*arguments, scale, out=out)
    given, of_lse, *_, of_max = launches[0][2][7:12]
    assert got is out and given is out and of_lse is lse and of_max is max_logits
    q, cache, indices = decode_inputs(s_q=1, h_q=1)
    odd = torch.zeros(3, 600, dtype=torch.bfloat16)[:, None, None, 8 : 8 + D_V].as_strided(
        (3, 1, 1, D_V), (600, 3, 5, 1)
    )
    got, lse = decoded(q, cache, indices, out=odd)
    given, of_lse = launches[1][2][7:9]
    assert got is odd and given.data_ptr() == odd.data_ptr() and given.stride(0) == 600 and of_lse is lse
    assert given.stride(1) % 8 == 0 and given.stride()[2:] == (D_V, 1)


def test_what_decoding_launches(launches):
    q, cache, indices = decode_inputs("bytes", s_q=2, h_q=17, k=640)
    out, lse = decoded(q, cache, indices, topk_length=i32([1, 2, 3]))
    (name, variant, arguments), (end, _, end_arguments) = launches
    assert (name, end, variant) == ("fp8_kv", "combine", (576, 16, 1))
    _, [pages], [slots], _, counted, _, _, out_, lse_, out_partial, lse_partial, max_logits, *_ = arguments
    assert pages.shape == (5, 6, 656) and pages.stride() == (6 * 656, 656, 1)
    assert slots.shape == (6, 640) and counted == 1
    assert (out_.data_ptr(), lse_.data_ptr()) == (out.data_ptr(), lse.data_ptr())
    # Six queries of ten tiles, two tiles a worker.
    assert arguments[-4:] == (2, 30, 0, 30) and end_arguments[-4:] == (30, 0, 10, 30)
    assert out_partial.shape == (60, 1, 17, 512) and lse_partial.shape == (60, 1, 17) and max_logits is None
    launches.clear()
    decoded(q, cache, indices, enable_batch_invariant=True)
    assert [name for name, _, _ in launches] == ["fp8_kv"] and launches[0][2][-3:] == (6, 1, 0)


def test_a_list_without_keys_is_none(launches):
    q, cache, indices = decode_inputs()
    extra = {"extra_k_cache": cache[:0], "extra_indices_in_kvcache": indices}
    decoded(q, cache, indices, **extra)
    decoded(q, cache[:0], indices, extra_k_cache=cache, extra_indices_in_kvcache=indices)
    decoded(q, cache, indices, extra_k_cache=cache, extra_indices_in_kvcache=indices)
    assert [variant[3] for name, variant, _ in launches if name == "attend"] == [1, 1, 2]
    launches.clear()
    for changes in ((q, cache[:0], indices), (q, cache, indices[..., :0]), (q[:, :0], cache, indices[:, :0])):
        out, lse = decoded(*changes)
        assert not out.any() and (lse == math.inf).all()
    q, kv, indices, scale = prefill_inputs()
    for changes in ((q, kv[:0], indices), (q, kv, indices[..., :0]), (q[:0], kv, indices[:0])):
        out, max_logits, lse = dsa.flash_mla_sparse_fwd(*changes, scale)
        assert not out.any() and (max_logits == -math.inf).all() and (lse == math.inf).all()
    assert not launches


def test_a_plan_remembers_the_call(launches):
    (q, cache, indices), (meta, _) = decode_inputs(), dsa.get_mla_metadata()
    for _ in range(2):
        decoded(q, cache, indices, meta)
    with pytest.raises(ValueError, match="was first used with"):
        decoded(q, cache, indices[..., :3], meta)
    with pytest.raises(ValueError, match="was first used with"):
        dsa.flash_mla_with_kvcache(q, cache, indices[:, 0].clamp(min=0), i32([1, 1, 1]), D_V, meta)


def test_float32_runs_the_reference_and_says_so_on_a_gpu(request, monkeypatch):
    monkeypatch.setattr(backends, "_warned", set())
    arguments = prefill_inputs(dtype=torch.float32)
    expected = reference.flash_mla_sparse_fwd(*arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(dsa.flash_mla_sparse_fwd(*arguments), expected)
    launches = request.getfixturevalue("launches")
    with pytest.warns(UserWarning, match="in float32 has no Hopper kernel yet") as found:
        for _ in range(2):
            assert_same(dsa.flash_mla_sparse_fwd(*arguments), expected)
    assert [warning.filename for warning in found] == [__file__] and not launches


@pytest.mark.parametrize("into", [False, True])
def test_torch_compile(into):
    def attention(q, kv, indices, scale, cache, slots):
        outs = [head_slice(*shape, 4, D_V)[0] if into else None for shape in ((3,), (3, 1))]
        first = dsa.flash_mla_sparse_fwd(q, kv, indices, scale, out=outs[0])
        return *first, *decoded(q[:, None] * 2, cache, slots, out=outs[1])

    arguments = (*prefill_inputs(), decode_inputs()[1], decode_inputs(s_q=1)[2])
    compiled = torch.compile(attention, fullgraph=False, backend="aot_eager")
    assert_same(compiled(*arguments), attention(*arguments))


def test_a_dtype_without_a_kernel_is_compiled_whole(monkeypatch):
    """The reference is traced; nothing asks the tensors of the trace for an address."""
    monkeypatch.setattr(dsa.backends, "_warned", {"flash_mla_sparse_fwd", "flash_mla_sparse_fwd in float32"})
    q, kv, indices = torch.randn(2, 4, 576), torch.randn(9, 1, 576), torch.randint(0, 9, (2, 1, 4), dtype=torch.int32)

    def attend(q, kv, indices):
        return dsa.flash_mla_sparse_fwd(q, kv, indices, 0.1)[0]

    with torch.no_grad():
        compiled = torch.compile(attend, fullgraph=True, backend="eager")(q, kv, indices)
        assert torch.equal(compiled, attend(q, kv, indices))
