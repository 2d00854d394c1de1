"""Scores over pages and selection in one op: the bits of the two ops for every variant, length and table."""

import itertools

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.selection import require_two_paged_ops
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import captured, far_apart

CASE = cases_of("paged_indexer_select")[0]
FP32, FP16 = torch.float32, torch.float16


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def arguments(lengths, next_n=1, **sizes):
    columns = max(1, *lengths)
    sizes = {"heads": 64, "dim": 128, "page_size": 64, "columns": columns, "accumulators": FP32, **sizes}
    return CASE.arguments("cuda", lengths=lengths, next_n=next_n, **sizes)


def with_scales(given, scales):
    """Make all keys and queries the same, so that scales (of a number of keys) are the scores."""
    cache, one = given["kv_cache"], torch.zeros(128, device="cuda")
    one[0] = 1.0
    given["q"] = one.expand(given["q"].shape).to(torch.float8_e4m3fn).contiguous()
    given["weights"] = torch.eye(64, device="cuda")[:1].expand(given["weights"].shape).contiguous()
    pages = cache.view(len(cache), -1)
    pages[:, : 64 * 128] = one.to(torch.float8_e4m3fn).view(torch.uint8).repeat(64)
    pages[:, 64 * 128 :] = scales(64 * len(cache)).float().cuda().view(torch.uint8).view(len(cache), -1)
    return given


def check(given, *top_ks):
    """Slots and positions, with values and without."""
    for top_k, slots in itertools.product(top_ks, (False, True)):
        own = given | {"top_k": top_k, "slots": slots}
        poison_free_memory(mebibytes=64)
        found = CASE.run(own)
        require_two_paged_ops(own, found)
        assert torch.equal(dsa.paged_indexer_select(**own | {"return_values": False}), found[0])


@pytest.mark.parametrize(
    ("heads", "dim", "next_n", "page_size"),
    [
        *itertools.product((8, 16, 32, 64), (128,), (1, 2, 3, 4), (32, 64)),
        *itertools.product((64,), (32, 64), (1, 2, 3, 4), (64,)),
    ],
)
def test_every_shape(heads, dim, next_n, page_size):
    for lengths in ([0, 1, 63, 64, 65, 257, 1000, 0, 0, 5, 4097, 2], [20000], [0]):
        given = arguments(lengths, next_n, heads=heads, dim=dim, page_size=page_size)
        for accumulators in (FP32, FP16):
            check(given | {"accumulators": accumulators}, 1, 100, 2048, 4096)
        check(given | {"max_context_len": 5000}, 512)


@pytest.mark.parametrize("batch", [1, 3, 33, 100])
def test_ragged_batches(batch):
    """Sequences are empty, short and long."""
    for next_n, heads in ((1, 64), (2, 64), (4, 64), (3, 8)):
        lengths = torch.randint(0, 3000, (batch,)) * (torch.rand(batch) > 0.3)
        long = torch.rand(batch) < 0.2
        lengths[long] = torch.randint(0, 60000, (batch,))[long]
        accumulators = FP16 if next_n == 4 else FP32
        check(arguments(lengths.tolist(), next_n, heads=heads, accumulators=accumulators), 64, 2048)


def test_a_million_keys():
    given = arguments([1 << 20], 2)
    for length in (1 << 20, 0, 5000):
        check(given | {"context_lens": int32([length])}, 2048)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_equal_scores_and_zeros(sign):
    for scales in (torch.ones, torch.zeros, lambda n: torch.rand(n) * (torch.rand(n) < 0.001)):
        given = with_scales(arguments([50000, 3000, 2048]), scales)
        check(given | {"weights": sign * given["weights"]}, 2048)


def test_nan_in_keys_and_scales():
    given = arguments([200, 4000], 2)
    raw, page = given["kv_cache"].view(len(given["kv_cache"]), -1), given["block_table"].tolist()
    raw[page[0][1], 13 * 128] = 0x7F  # key 77
    raw[page[1][2], 64 * 128 + 4 * 22 : 64 * 128 + 4 * 23] = 0xFF  # the scale of key 150
    check(given, 200)
    options = {"top_k": 200, "return_values": False}
    indices = dsa.paged_indexer_select(**given | options).tolist()
    assert all(77 not in row and len(set(row) - {-1}) == n for row, n in zip(indices[:2], (198, 199)))
    given["q"].view(torch.uint8)[1, 1, 3, 5] = 0x7F  # all scores of a query
    check(given, 200)
    assert (dsa.paged_indexer_select(**given | options)[3] == -1).all()


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_a_length_for_every_query(next_n):
    given = arguments([5, 700, 64, 1, 30000], next_n)
    lengths = torch.stack([int32([0, 300, 64, 1, 7]), *[given["context_lens"]] * (next_n - 1)], 1)
    wide = torch.full((5, 9), 7, dtype=torch.int32, device="cuda")
    wide[:, :next_n] = lengths
    for x in (lengths, lengths.flip(1).contiguous(), wide[:, :next_n]):
        check(given | {"context_lens": x}, 256)


def test_columns_fewer_than_keys_and_a_table_too_short():
    given = arguments([1000, 500, 70], 2, columns=333)
    check(given, 100, 500)
    for pages, columns in itertools.product((3, 1), (900, 70, 64, 2**31 - 1)):
        check(given | {"block_table": given["block_table"][:, :pages].clone(), "max_context_len": columns}, 300)


@pytest.mark.parametrize("next_n", [1, 4])
def test_lengths_of_any_numbers(next_n):
    garbage = [-(2**31), 2**31 - 1, -1, 0, 1, 64, 299, 300, 301, 2**30, -(2**31) + 2]
    given = arguments([300] * len(garbage), next_n, heads=8)
    check(given | {"context_lens": int32(garbage)}, 33, 400)
    check(given | {"context_lens": int32([garbage] * next_n).T.contiguous().roll(1, 0)}, 33)


def test_pages_outside_the_cache():
    """Their keys score -inf, and are selected if too few other keys are there."""
    for page_size in (32, 64):
        given = arguments([1000, 500], 2, page_size=page_size)
        for index, page in ((0, -1), (3, len(given["kv_cache"])), (6, 2**31 - 1), (7, -(2**31))):
            given["block_table"][0, index] = page
        check(given, 100, 900, 2000)
    given["block_table"].fill_(-1)
    check(given, 300)


def test_strides():
    """Pages 2^32 bytes apart, strided weights, lengths and tables, a cache of one page."""
    given = arguments([60, 700, 64, 1], spare_pages=0)
    check(given | {"kv_cache": far_apart(given["kv_cache"])}, 512)
    table = given["block_table"]
    wide = torch.full((4, 3 * table.shape[1]), 7, dtype=torch.int32, device="cuda")
    wide[:, 1 : 1 + table.shape[1]] = table
    lengths = int32([60, 9, 700, 9, 64, 9, 1, 9])[::2]
    given |= {"block_table": wide[:, 1 : 1 + table.shape[1]], "context_lens": lengths}
    for columns in (3 * 64, 3 * 64 + 1):
        check(given | {"weights": torch.randn(4, columns, device="cuda")[:, 64:128]}, 70)
    check(arguments([50], spare_pages=0), 70)


@pytest.mark.parametrize("length", [700, 40000])
def test_a_graph_takes_new_lengths_keys_and_pages(length):
    given = arguments([length] * 6, 2, top_k=600, slots=True)
    graph, got = captured(dsa.paged_indexer_select, **given)
    for i in range(6):
        new = CASE.arguments("cuda", i, lengths=[length] * 6, next_n=2, heads=64, dim=128, page_size=64)
        scales = new["kv_cache"].view(len(new["kv_cache"]), -1)[:, 64 * 128 :].view(FP32)
        scales *= torch.rand_like(scales) < (0.001 if i % 2 else 1.0)  # with ties
        new["context_lens"] = torch.randint(0, length + 1, (6,))
        for name in ("kv_cache", "block_table", "weights", "context_lens"):
            given[name].copy_(new[name])
        graph.replay()
        require_two_paged_ops(given, got)
