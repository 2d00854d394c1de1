"""Attention of packed sequences in training, on the GPU: the bits of multi-head attention, and empty rows."""

import pytest
import torch

import dsa
from dsa.kernels.training.limits import DENSE_CHANNELS
from dsa.ops.training import _packed_attention
from dsa.testing import poison_free_memory
from tests.gpu.attention import INF, starts
from tests.gpu.mla.test_mha_varlen_fwd import CASES, in_sequences, inputs
from tests.gpu.op_checks import assert_same_bits, replays


def attention_forward(q, k, v, cu_q, cu_k, longest, scale, causal=True):
    return _packed_attention.attention_forward(q, k, v, (cu_q, cu_k, len(q), longest), scale, causal)


def check(got, arguments, causal=True):
    """The bits of `mha_varlen_fwd`; rows after the last sequence are those of queries without keys."""
    (out, lse), cu_q = got, arguments[3]
    assert_same_bits(in_sequences(got, cu_q), in_sequences(dsa.mha_varlen_fwd(*arguments, causal), cu_q))
    end = int(cu_q[-1])
    assert out[end:].eq(0).all() and lse[:, end:].eq(INF).all()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("dims", DENSE_CHANNELS, ids=str)
def test_it_is_multi_head_attention(dims, case, causal):
    arguments = inputs(dims, *case)
    poison_free_memory(mebibytes=64)
    check(attention_forward(*arguments, causal), arguments, causal)


def test_a_graph_takes_new_data():
    q, k, v, cu, _, _, scale = inputs((128, 128), 8, 2, [300, 700], [300, 700])
    cuts = iter((300, 1, 999, 512))

    def call(q, k, v, cu):
        return attention_forward(q, k, v, cu, cu, 1000, scale)

    def renew():
        cut = next(cuts)
        return inputs((128, 128), 8, 2, [cut, 1000 - cut], [cut, 1000 - cut])[:4]

    for got in replays(call, (q, k, v, cu), renew, times=4):
        check(got, (q, k, v, cu, cu, 1000, scale))


def test_without_keys_rows_are_empty():
    q = torch.randn(5, 2, 64, device="cuda").bfloat16()
    out, lse = attention_forward(q, q[:0], q[:0], starts([5]), starts([0]), 0, 0.1)
    assert not out.any() and lse.eq(INF).all()
    for bounds in (starts([]), starts([0]), starts([0, 0])):
        out, lse = attention_forward(q, q, q, bounds, bounds, 5, 0.1)
        assert not out.any() and lse.eq(INF).all()
    out, lse = attention_forward(q[:0], q, q, starts([0]), starts([5]), 5, 0.1)
    assert out.shape == (0, 2, 64) and lse.shape == (2, 0)
