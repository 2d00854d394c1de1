"""The sparse stage's loss beside the forward attention to the same keys: there is no peer with published times."""

from functools import cache, partial

import torch

import dsa
from dsa.ops.training import sparse_indexer_loss as op
from dsa.reference.training import sparse_indexer_loss as reference
from dsa.testing import assert_close, bf16_gemm_rate
from dsa_bench.harness.case import Call, Case

# pass, keys, d, heads, selected keys: V3.2's and V4's
SHAPES = [
    (which, keys, *shape)
    for shape in ((576, 128, 2048), (512, 64, 512), (576, 64, 2048), (512, 128, 1024))
    for keys in (8192, 65536)
    for which in ("forward", "backward", "deterministic backward")
]
QUERIES, INDEX_HEADS, INDEX_DIM = 8192, 64, 128
_ceiling = cache(bf16_gemm_rate)


def _inputs(keys: int, d: int, heads: int, selected: int) -> tuple:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q, kv = normal(QUERIES, heads, d), normal(keys, 1, d)
    q_idx, k_idx = (normal(*shape, INDEX_DIM) * INDEX_DIM**-0.25 for shape in ((QUERIES, INDEX_HEADS), (keys,)))
    w = torch.randn(QUERIES, INDEX_HEADS, device="cuda") * INDEX_HEADS**-0.5
    indices = torch.rand(QUERIES, keys, device="cuda").topk(selected, dim=1).indices.int()[:, None].contiguous()
    return q, kv, q_idx, k_idx, w, indices, 2 * d**-0.5


def case(which: str, keys: int, d: int, heads: int, selected: int) -> Case:
    inputs = q, kv, q_idx, k_idx, w, indices, scale = _inputs(keys, d, heads, selected)
    lse = dsa.flash_mla_sparse_fwd(q, kv, indices, scale)[2].T
    some = torch.arange(0, QUERIES, QUERIES // 8, device="cuda")
    few = (q[some], kv, q_idx[some], k_idx, w[some], indices[some], scale)
    pairs = QUERIES * selected
    index_flops = 2 * pairs * INDEX_HEADS * INDEX_DIM
    if which == "forward":
        ours: Call = partial(op._sparse_indexer_loss.launch_on, q.device, *inputs, lse, False)
        flops = 2 * pairs * heads * d + index_flops

        def check(got: tuple[torch.Tensor, ...]) -> None:
            expected = reference.sparse_indexer_loss(*(x.double() for x in few[:5]), *few[5:])
            assert_close("kl", got[0][some], expected, abs_tol=2e-5, rel_tol=1e-3)
    else:
        grad = torch.ones(QUERIES, device="cuda")
        _, d_scores = op._sparse_indexer_loss.launch_on(q.device, *inputs, lse, False)
        of_forward = q_idx, k_idx, w, indices, grad, d_scores
        ours = partial(op._sparse_indexer_loss_gradient.launch_on, q.device, *of_forward, which != "backward")
        flops = 3 * index_flops

        def check(got: tuple[torch.Tensor, ...]) -> None:
            exact = [x.double() for x in few[:5]]
            learned = exact[2].requires_grad_()
            reference.sparse_indexer_loss(*exact, *few[5:]).sum().backward()
            assert_close("dq_idx", got[0][some], learned.grad, abs_tol=1e-3, rel_tol=0.02, cos_tol=1e-4)

    def figure(ms: float) -> str:
        rate = flops / (ms * 1e-3)
        return f"{rate / 1e12:.0f} TFLOP/s, {rate / _ceiling():.0%} of bf16 GEMM"

    attention = partial(dsa.flash_mla_sparse_fwd, q, kv, indices, scale)
    name = f"{which}, {QUERIES} queries, {keys} keys, d {d}, {heads} heads, k {selected}"
    calls, scale_of = {"dsa": [ours], "attention forward": [attention]}, frozenset({"attention forward"})
    return Case(name, calls, figure, check, repeats=10, yardsticks=scale_of)
