"""FlashMLA's signature of the sparse prefill kernel, at sizes of FlashMLA's own tests."""

import math

import torch

import dsa
from dsa.compat import flash_mla
from tests.gpu.attention import case_of
from tests.gpu.case_checks import by_sizes, grid
from tests.gpu.op_checks import assert_same_bits

CASE = case_of("flash_mla_sparse_fwd")
# Numbers of keys and of selected keys. In the last two more keys are selected than there are.
MANY_KEYS, FEW_KEYS = [(128, 128), (592, 128), (1592, 384), (1521, 512)], [(95, 128), (114, 384)]
SHAPES = {"tokens": (1, 62, 213), "heads": (64, 128), "d": (512, 576), "counted": (False, True), "sink": (False, True)}


def inputs(keys, **sizes):
    return CASE.arguments("cuda", keys=keys[0], top_k=keys[1], scale=0.05, **{"sink": False, "invalid": 0.0} | sizes)


def of_flash_mla(given):
    options = {name: given[name] for name in ("sm_scale", "attn_sink", "topk_length")}
    return flash_mla.flash_mla_sparse_fwd(given["q"], given["kv"], given["indices"], **options)


@by_sizes(
    grid(keys=MANY_KEYS, invalid=(0.1,), **SHAPES),
    grid(keys=FEW_KEYS, invalid=(0.4,), **SHAPES),
    grid(keys=((4321, 4096),), invalid=(0.5,), **SHAPES | {"tokens": (1234,)}),
    grid(keys=((64, 8192),), invalid=(0.5,), **SHAPES | {"tokens": (1024,)}),
)
def test_sparse_prefill_is_right(sizes, record_error):
    given = inputs(**sizes)
    if sizes["sink"]:
        given["attn_sink"] = torch.randn(sizes["heads"], device="cuda")
        given["attn_sink"][::3], given["attn_sink"][1::3] = math.inf, -math.inf
    record_error(CASE.check(given, of_flash_mla(given)))


def test_statistics_of_the_older_build_have_base_2():
    q, kv, indices, *_ = inputs((3000, 320), tokens=33, heads=16).values()
    indices[3] = -1
    expected, *statistics = dsa.flash_mla_sparse_fwd(q, kv, indices, 0.5)
    out = torch.empty(33, 64, 512, dtype=q.dtype, device="cuda")[:, :16]
    got = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.5, out=out, use_legacy=True, return_log2_lse=True)
    assert_same_bits(got[0], expected)
    assert got[0].data_ptr() == out.data_ptr()
    for x, right in zip(got[1:], statistics, strict=True):
        torch.testing.assert_close(x, right / math.log(2))
    assert flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.5, return_log2_lse=False)[1:] == (None, None)
