"""The bridges of sparse MLA attention on the CPU: outputs of any place, lists without keys, and plans."""

import math

import pytest
import torch

import dsa
from dsa import reference

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


@pytest.mark.parametrize(("heads", "head_tile"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, None), (128, None)])
def test_few_heads_run_the_kernel_that_swaps_a_and_b(named_launches, heads, head_tile):
    arguments = prefill_inputs(h_q=heads)
    dsa.flash_mla_sparse_fwd(*arguments)
    ((name, variant, (q, *_)),) = named_launches
    swap_ab = "sparse_mla_swap_ab", ("bfloat16", 576, head_tile, 1, True)
    assert (name, variant) == (swap_ab if head_tile else ("sparse_mla", ("bfloat16", 576, 1, True)))
    assert q.shape[1] == heads


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


def test_queries_of_many_keys_are_split_and_combined_unless_they_are_batch_invariant(named_launches):
    q, cache, indices = decode_inputs("bytes", s_q=2, h_q=17, k=640)
    decoded(q, cache, indices)
    (name, variant, arguments), (end, _, end_arguments) = named_launches
    assert (name, end, variant) == ("sparse_mla_fp8_kv", "sparse_mla_combine", (576, 16, 1))
    # Six queries of ten tiles, two tiles a worker.
    assert arguments[-4:] == (2, 30, 0, 30) and end_arguments[-4:] == (30, 0, 10, 30)
    named_launches.clear()
    decoded(q, cache, indices, enable_batch_invariant=True)
    ((name, _, arguments),) = named_launches
    assert name == "sparse_mla_fp8_kv" and arguments[-3:] == (6, 1, 0)


def test_an_output_of_one_head_may_have_any_stride_from_head_to_head(named_launches):
    odd = torch.zeros(3, 600, dtype=torch.bfloat16).as_strided((3, 1, 1, D_V), (600, 3, 5, 1), 8)
    decoded(*decode_inputs(s_q=1, h_q=1), out=odd)
    given = named_launches[0][2][7]
    assert given.data_ptr() == odd.data_ptr() and given.stride(0) == 600
    assert given.stride(1) % 8 == 0 and given.stride()[2:] == (D_V, 1)


def test_a_list_without_keys_is_none(named_launches):
    q, cache, indices = decode_inputs()
    extra = {"extra_k_cache": cache[:0], "extra_indices_in_kvcache": indices}
    decoded(q, cache, indices, **extra)
    decoded(q, cache[:0], indices, extra_k_cache=cache, extra_indices_in_kvcache=indices)
    decoded(q, cache, indices, extra_k_cache=cache, extra_indices_in_kvcache=indices)
    assert [variant[3] for name, variant, _ in named_launches if name == "sparse_mla_swap_ab"] == [1, 1, 2]
    named_launches.clear()
    for changes in ((q, cache[:0], indices), (q, cache, indices[..., :0]), (q[:, :0], cache, indices[:, :0])):
        out, lse = decoded(*changes)
        assert not out.any() and (lse == math.inf).all()
    q, kv, indices, scale = prefill_inputs()
    for changes in ((q, kv[:0], indices), (q, kv, indices[..., :0]), (q[:0], kv, indices[:0])):
        out, max_logits, lse = dsa.flash_mla_sparse_fwd(*changes, scale)
        assert not out.any() and (max_logits == -math.inf).all() and (lse == math.inf).all()
    assert not named_launches


def test_a_plan_remembers_the_call(named_launches):
    (q, cache, indices), (meta, _) = decode_inputs(), dsa.get_mla_metadata()
    for _ in range(2):
        decoded(q, cache, indices, meta)
    with pytest.raises(ValueError, match="was first used with"):
        decoded(q, cache, indices[..., :3], meta)
    with pytest.raises(ValueError, match="was first used with"):
        dsa.flash_mla_with_kvcache(q, cache, indices[:, 0].clamp(min=0), i32([1, 1, 1]), D_V, meta)


def test_a_dtype_without_a_kernel_is_compiled_whole(monkeypatch):
    """The reference is traced; nothing asks the tensors of the trace for an address."""
    monkeypatch.setattr(dsa.runtime.backends, "_warned", {"flash_mla_sparse_fwd", "flash_mla_sparse_fwd in float32"})
    q, kv, indices = torch.randn(2, 4, 576), torch.randn(9, 1, 576), torch.randint(0, 9, (2, 1, 4), dtype=torch.int32)

    def attend(q, kv, indices):
        return dsa.flash_mla_sparse_fwd(q, kv, indices, 0.1)[0]

    with torch.no_grad():
        compiled = torch.compile(attend, fullgraph=True, backend="eager")(q, kv, indices)
        assert torch.equal(compiled, attend(q, kv, indices))
