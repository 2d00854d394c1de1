"""`sparse_mla_attention` with gradients, on the CPU: its launches."""

import pytest
import torch

import dsa
from dsa import reference
from dsa.ops.training import sparse_mla_attention as op

BF16 = torch.bfloat16


def inputs(tokens=3, heads=5, keys=7, k=4, d=576, dtype=BF16, sink=True):
    q, kv = torch.randn(tokens, heads, d).to(dtype), torch.randn(keys, 1, d).to(dtype)
    indices = torch.randint(-1, keys + 1, (tokens, 1, k), dtype=torch.int32)
    return q, kv, indices, torch.randn(heads) if sink else None


@pytest.fixture
def launches(named_launches, monkeypatch):
    """Return the list of the op's launches, without the forward pass, which the reference computes."""

    def forward(q, kv, indices, scale, d_v, sink):
        with dsa.use_backend("reference"):
            return reference.flash_mla_sparse_fwd(q, kv, indices, scale, d_v, sink)

    monkeypatch.setattr(op, "flash_mla_sparse_fwd", forward)
    return named_launches


def backward(q, kv, indices, sink, **options):
    leaves = [x.detach().requires_grad_() for x in (q, kv, *(() if sink is None else (sink,)))]
    out, lse = dsa.sparse_mla_attention(leaves[0], leaves[1], indices, 0.1, 512, *leaves[2:], **options)
    return torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("d", [576, 512])
def test_what_is_launched(launches, d, sink):
    q, kv, indices, own = inputs(d=d, sink=sink)
    gradients = backward(q, kv, indices, own)
    assert [x.shape for x in gradients] == [x.shape for x in (q, kv, own) if x is not None]
    first, main, last = launches
    assert (first[:2], last[:2]) == (
        ("backward_inputs", ("bfloat16", sink, True)),
        ("reorder_sums", ("bfloat16", d)),
    )
    assert main[:2] == ("sparse_mla_backward", ("bfloat16", d, False))
    *_, dq, sums, counter, scale, scale_log2, ctas = main[2]
    assert dq.shape == q.shape and (scale, ctas) == (0.1, 3) and scale_log2 == pytest.approx(0.1 / 0.6931472)
    # After the keys' rows there is one row per CTA, for the gradients of invalid indices.
    assert sums.shape == (7 + 3, d) and sums.eq(0).all()
    assert (counter.shape, counter.dtype) == ((1,), torch.int32) and counter.eq(0).all()


def test_deterministic_works_on_some_queries_at_a_time(launches):
    q, kv, indices, sink = inputs(tokens=150, heads=70, k=65)
    backward(q, kv, indices, sink, deterministic=True)
    names = [name for name, *_ in launches]
    # 132 SMs, and two work tiles per query: 66 queries per launch.
    assert names == ["backward_inputs", *["sparse_mla_backward", "sum_lists"] * 3, "reorder_sums"]
    assert [len(arguments[0]) for name, _, arguments in launches if name == "sparse_mla_backward"] == [66, 66, 18]
    assert [variant for name, variant, _ in launches if name == "sparse_mla_backward"] == [("bfloat16", 576, True)] * 3
    counters = [arguments[7] for name, _, arguments in launches if name == "sparse_mla_backward"]
    assert all(x.eq(0).all() for x in counters) and len({x.data_ptr() for x in counters}) == 3


def test_torch_may_ask_for_it(launches):
    torch.use_deterministic_algorithms(True)
    try:
        backward(*inputs())
        backward(*inputs(), deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    backward(*inputs())
    assert [variant[2] for name, variant, _ in launches if name == "sparse_mla_backward"] == [True, False, False]


def test_lists_name_every_pick_of_a_key():
    indices = torch.tensor([[3, 0, 9, 3], [0, -1, 3, 1]], dtype=torch.int32)
    order, bounds = op._lists(indices, 5, 100)
    assert bounds.tolist() == [0, 2, 3, 3, 6, 6] and bounds.dtype == order.dtype == torch.int32
    assert order.tolist()[:6] == [1, 100, 103, 0, 3, 102]


@pytest.mark.parametrize("empty", ["tokens", "heads", "keys", "k"])
def test_nothing_to_do(launches, empty):
    q, kv, indices, sink = inputs(**{empty: 0})
    assert all(x.eq(0).all() for x in backward(q, kv, indices, sink)) and not launches
