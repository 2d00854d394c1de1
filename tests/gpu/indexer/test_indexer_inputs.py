"""quantize_indexer_queries and write_indexer_keys on the GPU: every variant, numbers of tokens, slots outside the
cache, NaN, and queries with the bits of the reference on a CPU."""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory
from tests.gpu.attention import checked

QUERIES, KEYS = cases_of("indexer_inputs")
DTYPES = torch.bfloat16, torch.float16, torch.float32
OUTSIDE = {
    torch.int32: [-1, -(2**31), 2**31 - 1],
    torch.int64: [-1, -(2**31), 2**31 - 1, 2**32, 2**63 - 1, -(2**32) + 5, 2**40 + 5],
}
VARIANTS = [
    dict(zip(("dtype", "rotated", "interleaved", "dims", "use_ue8m0"), values))
    for values in product(DTYPES, (32, 64, 128), (True, False), ("first", "last"), (True, False))
]
KEY_SIZES = [
    *({"tokens": 501, "slot_dtype": torch.int64, "eps": 1e-3, **variant} for variant in VARIANTS),
    *({"tokens": tokens, "slot_dtype": torch.int64} for tokens in (0, 1, 31, 33, 4096)),
    *({"tokens": 70, "page_size": page_size} for page_size in (1 << 10, 64, 4)),
]


def on_cpu(given):
    given = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    return [x.cuda() for x in dsa.reference.quantize_indexer_queries(**given)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_queries_are_right(variant, record_error):
    checked(QUERIES, QUERIES.arguments("cuda", tokens=37, heads=5, **variant), record_error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 31, 33, 5000])
@pytest.mark.parametrize("heads", [1, 8, 64])
def test_queries_have_the_bits_of_a_cpu(tokens, heads, dtype):
    """Scales are powers of two. For other scales a CPU divides by 448 and a GPU multiplies by 1 / 448, so bits can
    differ."""
    poison_free_memory(mebibytes=16)
    given = QUERIES.arguments("cuda", tokens=tokens, heads=heads, dtype=dtype, use_ue8m0=True)
    for got, expected in zip(QUERIES.run(given), on_cpu(given), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_queries_that_are_not_numbers():
    given = QUERIES.arguments("cuda", tokens=6, heads=8, dtype=torch.float32, use_ue8m0=True)
    q = given["q"]
    q[1, 2, 3], q[2, 3, 100], q[3, 4, 127], q[4] = torch.nan, torch.inf, -torch.inf, 0.0
    for got, expected in zip(QUERIES.run(given), on_cpu(given), strict=True):
        assert torch.equal(got.float().nan_to_num(7), expected.float().nan_to_num(7))


@pytest.mark.parametrize("sizes", KEY_SIZES, ids=str)
def test_keys_are_right(sizes, record_error):
    given = KEYS.arguments("cuda", **sizes)
    cache, slots = given["cache"], given["slots"]
    outside = [cache.shape[0] * cache.shape[1], *OUTSIDE[slots.dtype]]
    if len(slots) > 30:
        slots[2 : 2 + len(outside)] = torch.tensor(outside, dtype=slots.dtype, device="cuda")
    record_error(KEYS.check_call(given))
