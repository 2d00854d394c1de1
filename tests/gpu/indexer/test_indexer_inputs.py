"""The indexer's queries and keys: every variant, counts, strides, slots outside the cache, NaN, bits of a CPU."""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import far_apart

QUERIES, KEYS = cases_of("indexer_inputs")
OUTSIDE = {
    torch.int32: [-1, -(2**31), 2**31 - 1],
    torch.int64: [-1, -(2**31), 2**31 - 1, 2**32, 2**63 - 1, -(2**32) + 5, 2**40 + 5],
}


def on_cpu(given):
    given = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    return [x.cuda() for x in dsa.reference.quantize_indexer_queries(**given)]


def variants(test):
    for name, values in (
        ("use_ue8m0", [True, False]),
        ("dims", ["first", "last"]),
        ("interleaved", [True, False]),
        ("rotated", [32, 64, 128]),
        ("dtype", [torch.bfloat16, torch.float16, torch.float32]),
    ):
        test = pytest.mark.parametrize(name, values)(test)
    return test


@variants
def test_queries(dtype, rotated, interleaved, dims, use_ue8m0, record_error):
    poison_free_memory(mebibytes=16)
    kind = {"dtype": dtype, "rotated": rotated, "interleaved": interleaved, "dims": dims, "use_ue8m0": use_ue8m0}
    record_error(QUERIES.verify("cuda", tokens=37, heads=5, **kind))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 31, 33, 5000])
@pytest.mark.parametrize("heads", [1, 8, 64])
def test_queries_have_the_bits_of_a_cpu(tokens, heads, dtype):
    """With scales that are powers of two. A CPU divides by 448, and a GPU multiplies with 1 / 448."""
    poison_free_memory(mebibytes=16)
    given = QUERIES.arguments("cuda", tokens=tokens, heads=heads, dtype=dtype, use_ue8m0=True)
    for got, expected in zip(QUERIES.run(given), on_cpu(given), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_strided_queries_and_misaligned_angles():
    given = QUERIES.arguments("cuda", tokens=20, heads=4)
    wide = torch.randn(20, 4, 3 * 128, device="cuda").bfloat16()
    given |= {"q": wide[..., 128:256], "weights": torch.randn(20, 9, device="cuda")[:, 2:6]}
    given |= {name: torch.randn(20, 33, device="cuda")[:, 1:] for name in ("cos", "sin")}
    QUERIES.check(given, QUERIES.run(given))
    one = {name: given[name][:1] for name in ("cos", "sin")} | {"weights": given["weights"][:1, :1]}
    given |= one | {"q": wide[:1, :1, 128:256].as_strided((1, 1, 128), (7, 3, 1), 128)}
    QUERIES.check(given, QUERIES.run(given))


def test_queries_that_are_not_numbers():
    given = QUERIES.arguments("cuda", tokens=6, heads=8, dtype=torch.float32, use_ue8m0=True)
    q = given["q"]
    q[1, 2, 3], q[2, 3, 100], q[3, 4, 127], q[4] = torch.nan, torch.inf, -torch.inf, 0.0
    for got, expected in zip(QUERIES.run(given), on_cpu(given), strict=True):
        assert torch.equal(got.float().nan_to_num(7), expected.float().nan_to_num(7))


def verify_keys(**sizes):
    """With slots outside the cache, which the kernel skips."""
    given = KEYS.arguments("cuda", **sizes)
    cache, slots = given["cache"], given["slots"]
    before, capacity = cache.clone(), cache.shape[0] * cache.shape[1]
    if len(slots) > 30:
        outside = [capacity, *OUTSIDE[slots.dtype]]
        slots[2 : 2 + len(outside)] = torch.tensor(outside, dtype=slots.dtype, device="cuda")
    return KEYS.check(given | {"cache": before}, KEYS.results(given))


@variants
def test_keys(dtype, rotated, interleaved, dims, use_ue8m0, record_error):
    kind = {"dtype": dtype, "rotated": rotated, "interleaved": interleaved, "dims": dims, "use_ue8m0": use_ue8m0}
    record_error(verify_keys(tokens=501, slot_dtype=torch.int64, eps=1e-3, **kind))


@pytest.mark.parametrize(
    ("tokens", "page_size", "slot_dtype"),
    [*product((0, 1, 31, 33, 4096), (64,), (torch.int64,)), *product((70,), (1 << 10, 64, 4), (torch.int32,))],
)
def test_key_counts(tokens, page_size, slot_dtype, record_error):
    record_error(verify_keys(tokens=tokens, page_size=page_size, slot_dtype=slot_dtype))


def test_pages_far_apart():
    given = KEYS.arguments("cuda", tokens=300)
    far = far_apart(given["cache"])
    for cache in (far, given["cache"]):
        dsa.write_indexer_keys(**given | {"cache": cache})
    assert torch.equal(far, given["cache"])
