"""The merge of attention branches: bytes per second, for two branches without a sink compared with vLLM and SGLang."""

from functools import partial

import dsa
from dsa_bench.harness.case import Case, Peers, bf16, bytes_rate, f32, fresh
from dsa_bench.peers import operators

# tokens, heads, branches, with a sink: prefill chunks (4096 and 8192 tokens) and decode batches
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


def case(tokens: int, heads: int, count: int, with_sink: bool) -> Case:
    size = tokens * heads * ((count + 1) * (2 * D_V + 4))
    inputs = fresh(
        size, lambda: ([bf16(tokens, heads, D_V) for _ in range(count)], [f32(tokens, heads) for _ in range(count)])
    )
    sink = f32(heads) if with_sink else None
    return Case(
        f"{tokens} tokens, {heads} heads, {count} branches{', sink' if with_sink else ''}, bf16",
        {"dsa": [partial(dsa.merge_attention, *i, sink) for i in inputs]},
        bytes_rate(size),
        operators.merge(inputs) if count == 2 and not with_sink else Peers(),
        graph=True,
    )
