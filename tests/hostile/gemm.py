"""Index tensors of products: where the rows of a weight end."""

from collections.abc import Callable

import torch

import dsa
from tests.hostile import IndexArgument, Prepared, Results
from tests.hostile.places import int32, randn, rows_but

E4M3 = torch.float8_e4m3fn
PAGE = 64


def products(device: str) -> Prepared:
    ends = [10, 70, 70, 90]
    a = randn(90, 256, device=device).to(E4M3), torch.rand(90, 2).to(device)
    b = randn(4, 136, 256, device=device).to(E4M3), torch.rand(4, 2, 2).to(device)

    def run(given: torch.Tensor) -> Results:
        return [dsa.grouped_fp8_gemm_nt(a, b, given)]

    def rest(e: int) -> Callable[[Results], Results]:
        begins = [0, *ends]
        return rows_but(range(begins[e], begins[min(e + 2, len(ends))]))

    return Prepared(run, int32(ends, device), {f"end {e}": (e, rest(e)) for e in range(4)})


ARGUMENTS: list[IndexArgument] = [
    IndexArgument("grouped_fp8_gemm_nt", "ends", products),
]
