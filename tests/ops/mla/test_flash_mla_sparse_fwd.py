"""The arguments that sparse MLA attention passes to its kernels, on the CPU: heads, splits, outputs in larger tensors,
and empty lists of keys."""

import math

import pytest
import torch

import dsa
from dsa.cases import CASES

BY_NAME = {case.name: case for case in CASES}
PREFILL, DECODE = BY_NAME["flash_mla_sparse_fwd"], BY_NAME["flash_mla_with_kvcache v32"]
D_V = 512
LAYOUTS = ["bf16, 576", "656 bytes", "584 bytes"]


def prefill(heads=4, dtype=torch.bfloat16):
    return PREFILL.arguments(tokens=3, heads=heads, keys=20, top_k=7, dtype=dtype, sink=False)


def decode(layout="bf16, 576", s_q=2, heads=4, top_k=9):
    return DECODE.arguments(layout=layout, batch=3, s_q=s_q, heads=heads, top_k=top_k, rows=14, page=6)


@pytest.mark.parametrize(("heads", "head_tile"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, None), (128, None)])
def test_few_heads_run_the_kernel_that_swaps_a_and_b(named_launches, heads, head_tile):
    PREFILL.run(prefill(heads))
    ((name, variant, (q, *_)),) = named_launches
    swap_ab = "sparse_mla_swap_ab", ("bfloat16", 576, head_tile, 1, True)
    assert (name, variant) == (swap_ab if head_tile else ("sparse_mla", ("bfloat16", 576, 1, True)))
    assert q.shape[1] == heads


@pytest.mark.parametrize(
    ("case", "given"),
    [
        *((PREFILL, prefill(dtype=dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        *((DECODE, decode(layout)) for layout in LAYOUTS),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_a_part_of_a_tensor_is_written(case, given):
    expected = case.run(given)
    *rows, heads, _ = given["q"].shape
    whole = torch.full((*rows, heads + 4, D_V), 7.0, dtype=given["q"].dtype)
    out = whole[..., 1 : 1 + heads, :]
    got = case.run(given | {"out": out})
    assert got[0] is out and all(map(torch.equal, got, expected))
    assert [x.stride() for x in got[1:]] == [x.stride() for x in expected[1:]]
    cache = "kv" if case is PREFILL else "k_cache"
    case.run(given | {"out": out, cache: given[cache][:0]})
    assert not out.any() and (whole[..., :1, :] == 7).all() and (whole[..., 1 + heads :, :] == 7).all()


def test_queries_of_many_keys_are_split_and_combined_unless_they_are_batch_invariant(named_launches):
    given = decode("656 bytes", heads=17, top_k=640)
    DECODE.run(given)
    (name, variant, arguments), (end, _, end_arguments) = named_launches
    assert (name, end, variant) == ("sparse_mla_fp8_kv", "sparse_mla_combine", (576, 16, 1))
    # Six queries have ten key tiles each. 30 CTAs per head tile divide these 60 tiles.
    assert arguments[-4:] == (2, 30, 0, 30) and end_arguments[-4:] == (30, 0, 10, 30)
    named_launches.clear()
    DECODE.run(given | {"enable_batch_invariant": True})
    ((name, _, arguments),) = named_launches
    assert name == "sparse_mla_fp8_kv" and arguments[-3:] == (6, 1, 0)


def test_an_output_of_one_head_may_have_any_stride_from_head_to_head(named_launches):
    odd = torch.zeros(3, 600, dtype=torch.bfloat16).as_strided((3, 1, 1, D_V), (600, 3, 5, 1), 8)
    DECODE.run(decode(s_q=1, heads=1) | {"out": odd})
    given = named_launches[0][2][7]
    assert given.data_ptr() == odd.data_ptr() and given.stride(0) == 600
    assert given.stride(1) % 8 == 0 and given.stride()[2:] == (D_V, 1)


def test_a_list_without_keys_is_left_out(named_launches):
    given = decode()
    cache, indices = given["k_cache"], given["indices"]
    more = given | {"extra_k_cache": cache, "extra_indices_in_kvcache": indices}
    for change in ({"extra_k_cache": cache[:0]}, {"k_cache": cache[:0]}, {}):
        DECODE.run(more | change)
    assert [variant[3] for name, variant, _ in named_launches if name == "sparse_mla_swap_ab"] == [1, 1, 2]
    named_launches.clear()
    for change in (
        {"k_cache": cache[:0]},
        {"indices": indices[..., :0]},
        {"q": given["q"][:, :0], "indices": indices[:, :0]},
    ):
        out, lse = DECODE.run(given | change)
        assert not out.any() and (lse == math.inf).all()
    given = prefill()
    indices = given["indices"]
    for change in (
        {"kv": given["kv"][:0]},
        {"indices": indices[..., :0]},
        {"q": given["q"][:0], "indices": indices[:0]},
    ):
        out, max_logits, lse = PREFILL.run(given | change)
        assert not out.any() and (max_logits == -math.inf).all() and (lse == math.inf).all()
    assert not named_launches


def test_a_dtype_without_a_kernel_is_compiled_whole(monkeypatch):
    """torch.compile traces the reference for float32, which has no kernel. The checks must not ask for the address of a
    traced tensor, because that would break the graph."""
    monkeypatch.setattr(dsa.runtime.backends, "_warned", {"flash_mla_sparse_fwd", "flash_mla_sparse_fwd in float32"})
    q, kv, indices = torch.randn(2, 4, 576), torch.randn(9, 1, 576), torch.randint(0, 9, (2, 1, 4), dtype=torch.int32)

    def attend(q, kv, indices):
        return dsa.flash_mla_sparse_fwd(q, kv, indices, 0.1)[0]

    with torch.no_grad():
        compiled = torch.compile(attend, fullgraph=True, backend="eager")(q, kv, indices)
        assert torch.equal(compiled, attend(q, kv, indices))
