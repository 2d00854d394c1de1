"""The merge of attention branches: bytes a second, beside the merges of two in vLLM and SGLang."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import assert_close, copy_bandwidth
from dsa_bench.harness.case import Call, Case
from dsa_bench.peers import operators
from dsa_bench.peers.package import Peers

# tokens, heads, branches, with a sink: a prefill chunk, decode batches
SHAPES = [
    (4096, 128, 2, False),
    (4096, 128, 2, True),
    (4096, 128, 3, False),
    (4096, 128, 4, False),
    (8192, 64, 2, True),
    *((tokens, heads, 2, False) for tokens in (1, 16, 128) for heads in (16, 128)),
    (128, 128, 4, True),
]
PROBED = [(128, 16, 2, False)]
D_V = 512
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)
Branches = tuple[list[torch.Tensor], list[torch.Tensor]]


def _branches(tokens: int, heads: int, count: int) -> Branches:
    outs = [torch.randn(tokens, heads, D_V, device="cuda").bfloat16() for _ in range(count)]
    return outs, [torch.randn(tokens, heads, device="cuda") for _ in range(count)]


def case(tokens: int, heads: int, count: int, with_sink: bool) -> Case:
    size = tokens * heads * ((count + 1) * (2 * D_V + 4))
    inputs = [_branches(tokens, heads, count) for _ in range(min(64, max(2, int(_FRESH_BYTES / size))))]
    sink = torch.randn(heads, device="cuda") if with_sink else None
    peers = operators.merge(inputs) if count == 2 and not with_sink else Peers()
    calls: dict[str, list[Call]] = {"dsa": [partial(dsa.merge_attention, *i, sink) for i in inputs], **peers.calls}

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: tuple[torch.Tensor, torch.Tensor]) -> None:
        with dsa.use_backend("reference"):
            expected = dsa.merge_attention(*inputs[0], sink)
        assert_close("out", got[0], expected[0], abs_tol=1e-5, rel_tol=2.01 / 256, cos_tol=5e-6)
        assert_close("lse", got[1], expected[1], abs_tol=1e-6, rel_tol=1e-6)

    name = f"{tokens} tokens, {heads} heads, {count} branches{', sink' if with_sink else ''}, bf16"
    return Case(name, calls, figure, check, graph=True, failed=peers.failed)
