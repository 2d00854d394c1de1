"""The streams' collapse with norm and cast, compared with the two kernels one after the other."""

import torch

import dsa
from dsa_bench.harness.calls import over
from dsa_bench.harness.case import Case, bytes_rate, fresh

# tokens, channels of a stream
SHAPES = [(tokens, d) for d in (4096, 7168) for tokens in (4096, 128, 32, 8, 1)]


def _apart(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    *first, weight = given
    x, *weights = dsa.hyper_collapse(*first)
    return *dsa.rms_norm_cast_to_fp8(x, weight), *weights


def case(tokens: int, d: int) -> Case:
    def inputs() -> tuple[torch.Tensor, ...]:
        streams = torch.randn(tokens, 4, d, device="cuda").bfloat16()
        return streams, *(torch.randn(*s, device="cuda") for s in ((tokens, 24), (24,), (3,), (d,)))

    size = tokens * (2 * 5 * d + d + 4 * d // 128 + 4 * (24 + 20)) + 4 * d
    calls = over(fresh(size, inputs), {"dsa": dsa.hyper_collapse_norm_cast_to_fp8, "apart": _apart})
    return Case(f"{tokens} tokens, D {d}", calls, bytes_rate(size), graph=True, yardsticks=frozenset({"apart"}))
