"""The top-k in every variant: distributions, misleading samples, ragged rows, slots, strides, 64-bit offsets."""

import math

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.selection import selected
from dsa.kernels.indexer import topk_config
from dsa.kernels.indexer.topk_indices_sm90 import SAMPLE
from dsa.runtime.op import forget_calls
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import replays

CASE, _, INTO = cases_of("topk_indices")
INF, NAN = math.inf, math.nan
SIZES = [(3, 5000), (2, 20000), (1, 131072), (7, 4097), (2, 8192)]


CHOOSE = topk_config.choose_config


def forced(patch, cfg):
    """Make the op choose this variant for all shapes that it takes."""

    def choose(rows, vectors, k, width, multiprocessors):
        fits = cfg.tile > 0 or vectors <= cfg.resident_vectors(width)
        return cfg if fits and cfg.takes(k) else CHOOSE(rows, vectors, k, width, multiprocessors)

    patch.setattr(topk_config, "choose_config", choose)
    forget_calls()


@pytest.fixture(params=topk_config.CONFIGS, ids=lambda c: f"{c.threads}-{c.tile}-{c.cluster}")
def config(request, monkeypatch):
    """Every variant in turn."""
    forced(monkeypatch, request.param)
    yield request.param
    forget_calls()


def most(cfg):
    return max(k for k in (1024, 2048, 4096) if cfg.takes(k))


def i32(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def arguments(scores, k, **options):
    absent = dict.fromkeys(("starts", "lengths", "block_table", "page_size", "row_to_seq", "out"))
    return absent | {"scores": scores, "k": k, "sorted": False, "return_values": True} | options


def check(scores, k, **options):
    poison_free_memory(mebibytes=8)
    given = arguments(scores, k, **options)
    CASE.check(given, CASE.run(given))


def sampled(n):
    """Return the positions that the kernel samples in a row of n numbers."""
    pairs = min(n // 16, SAMPLE) // 8
    i, step = torch.arange(pairs, device="cuda"), n // 8 // pairs
    pair = i * step + (((i * 2654435761) % 2**32) * step >> 32)
    return (8 * pair[:, None] + torch.arange(8, device="cuda")).view(-1)


def neighbours(n, low_bits):
    """Return n numbers from 1 up that differ only in the last bits of their mantissa."""
    return (torch.randint(0, 2**low_bits, n, device="cuda", dtype=torch.int32) + 0x3F800000).view(torch.float32)


DISTRIBUTIONS = {
    "uniform": lambda r, n: torch.rand(r, n, device="cuda"),
    "normal": lambda r, n: torch.randn(r, n, device="cuda"),
    "one exponent": lambda r, n: 1 + torch.rand(r, n, device="cuda"),
    "negative": lambda r, n: -torch.rand(r, n, device="cuda") - 1e-3,
    "huge range": lambda r, n: torch.randn(r, n, device="cuda") * 10.0 ** torch.randint(-40, 38, (r, n), device="cuda"),
    "two values": lambda r, n: (torch.rand(r, n, device="cuda") < 0.3).float() - 0.5,
    "all equal": lambda r, n: torch.full((r, n), -7.25, device="cuda"),
    "last bits": lambda r, n: neighbours((r, n), 5),
    "last digit": lambda r, n: neighbours((r, n), 10),
    "ascending": lambda r, n: torch.randn(r, n, device="cuda").sort(1).values,
    "descending": lambda r, n: torch.randn(r, n, device="cuda").sort(1, descending=True).values,
    "plateau of zeros": lambda r, n: torch.randn(r, n, device="cuda").mul(2).sub(2).relu(),
    "both zeros": lambda r, n: torch.where(torch.rand(r, n, device="cuda") < 0.5, -0.0, 0.0),
    "denormal": lambda r, n: torch.randint(-1000, 1000, (r, n), device="cuda") * 1.4e-45,
    "infinite": lambda r, n: (torch.randn(r, n, device="cuda") * 3).round().mul(INF).nan_to_num(0.0, INF, -INF),
    "mostly NaN": lambda r, n: torch.randn(r, n, device="cuda").where(torch.rand(r, n, device="cuda") > 0.9, NAN),
    "all NaN": lambda r, n: torch.full((r, n), NAN, device="cuda"),
    "all -inf": lambda r, n: torch.full((r, n), -INF, device="cuda"),
    "spikes": lambda r, n: torch.where(torch.rand(r, n, device="cuda") < 1e-3, 1e30, torch.randn(r, n, device="cuda")),
    "recent first": lambda r, n: torch.randn(r, n, device="cuda") + torch.arange(n, device="cuda") / n * 8,
    "periodic": lambda r, n: torch.randn(r, n, device="cuda") + 5 * (torch.arange(n, device="cuda") % 64 == 0),
}  # fmt: skip


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_distributions(config, distribution):
    for rows, cols in SIZES:
        scores = DISTRIBUTIONS[distribution](rows, cols)
        for k in (1, 33, 512, min(most(config), 2048), most(config)):
            check(scores, k)
        check(scores.bfloat16(), 512)
        check(scores.bfloat16(), most(config), sorted=True)


@pytest.mark.parametrize("good", [False, True], ids=["sample all low", "sample all high"])
def test_a_sample_that_misleads(config, good):
    for n in (config.capacity + 4097, 60000, 300000):
        scores = torch.randn(2, n, device="cuda")
        scores[:, sampled(n)] += 100 if good else -100
        for k in (1, 100, most(config)):
            check(scores, k)
            check(scores.sort(1).values, k)


@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 511, 512, 1000, 1023, 1024, 2047, 2048])
def test_k(config, k):
    check(torch.randn(5, 3000, device="cuda"), k)
    check(torch.randn(3, 30001, device="cuda").mul(3).round(), k, sorted=True)


@pytest.mark.parametrize(
    ("rows", "cols", "k"),
    [*((rows, cols, 5) for rows, cols in ((0, 10), (3, 0), (0, 0), (1, 1), (2, 7))), (70000, 600, 17)]
    + [(rows, 1200001, 2048) for rows in (1, 3, 140)],
)
def test_sizes(rows, cols, k):
    scores = torch.randn(rows, cols, device="cuda").mul(1000).round()
    check(scores, k, sorted=rows < 10)
    check(scores, k, lengths=torch.randint(0, cols + 1, (rows,), device="cuda", dtype=torch.int32))


@pytest.mark.parametrize("sorted_", [False, True])
def test_ragged_rows(config, sorted_):
    cols = 40000
    scores = torch.randn(64, cols, device="cuda")
    starts = torch.randint(0, cols, (64,), device="cuda", dtype=torch.int32)
    lengths = (torch.rand(64, device="cuda") ** 3 * (cols - starts)).int()
    lengths[:8] = i32([0, 1, 2, 511, 512, 513, -5, cols])
    starts[:4], starts[8:14] = 7, i32([-3, -(2**31), cols, cols - 1, 2**31 - 1, cols + 5])
    lengths[8:14] = i32([100, 2**31 - 1, 5, 5, 5, 2**31 - 1])
    starts[9] = -(2**30)
    for k in (512, 2048):
        check(scores, k, starts=starts, lengths=lengths, sorted=sorted_)
        check(scores, k, lengths=lengths, sorted=sorted_)
        check(scores, k, starts=starts.clamp(-100, cols + 100), sorted=sorted_)
        check(scores.bfloat16(), k, starts=starts, lengths=lengths, sorted=sorted_)


@pytest.mark.parametrize("sorted_", [False, True])
def test_into_a_part_of_a_buffer(config, sorted_):
    """Rows begin at multiples of 16 bytes and elsewhere. The buffer around them does not change."""
    for rows, cols in (*SIZES, (5, 0)):
        scores = torch.randn(rows, cols, device="cuda")
        lengths = torch.randint(0, cols + 1, (rows,), dtype=torch.int32, device="cuda")
        for k, before, after in ((1, 0, 0), (512, 4, 4), (512, 1, 2), (most(config), 3, 0)):
            buffer = torch.full((rows + 2, before + k + after), 77, dtype=torch.int32, device="cuda")
            part = buffer[1:-1, before : before + k]
            for values in (True, False):
                part.fill_(77)
                given = arguments(scores, k, lengths=lengths, sorted=sorted_, return_values=values, out=part)
                found = INTO.results(given)
                assert found[0] is part
                INTO.check(given, found)
            part.fill_(77)
            assert (buffer == 77).all()


@pytest.mark.parametrize("paged", [False, True])
def test_graph_replay_into_a_part_of_a_buffer(paged):
    """There are 128 rows, as in a decoding batch, of positions or slots."""

    def renew():
        return torch.randn(128, 20000, device="cuda"), torch.randint(0, 20001, (128,), device="cuda").int()

    table = torch.randint(-1, 1000, (64, 320), dtype=torch.int32, device="cuda")
    paging = {"block_table": table, "page_size": 64, "row_to_seq": torch.arange(128, device="cuda").int() // 2}
    buffer = torch.full((128, 2100), 77, dtype=torch.int32, device="cuda")
    scores, lengths = renew()
    given = arguments(scores, 2048, lengths=lengths, out=buffer[:, 50:2098], **(paging if paged else {}))
    for found in replays(lambda *_: INTO.results(given), (scores, lengths), renew):
        INTO.check(given, found)
        assert (buffer[:, :50] == 77).all() and (buffer[:, 2098:] == 77).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [20000, 20001, 20002, 20003, 20477])
def test_strides_and_unaligned_views(config, stride, dtype):
    wide = torch.full((9, stride), NAN, dtype=dtype, device="cuda")
    for first in (0, 1, 2, 3, 5, 7):
        view = wide[:, first : first + 19990]
        view.copy_(torch.randn(9, 19990, device="cuda"))
        check(view, 700)
    check(wide[:1].expand(4, -1), 700)


def test_slots(config):
    rows, cols, pages = 6, 30000, 469
    scores = torch.randn(rows, cols, device="cuda")
    table = torch.randperm(2 * pages, device="cuda", dtype=torch.int32)[: 2 * pages].view(2, pages)
    table[0, 5], table[1, 7], table[0, 9], table[1, 3] = -1, -(2**31), 2**31 - 1, 2**25
    row_to_seq = i32([0, 1, 0, 1, -1, 2])
    lengths = i32([30000, 20000, 3, 0, 500, 600])
    for by_value in (False, True):
        for size in (64, 1, 7, 100):
            options = {"block_table": table, "page_size": size, "row_to_seq": row_to_seq, "sorted": by_value}
            check(scores, 512, lengths=lengths, **options)
    own = torch.arange(rows * pages, dtype=torch.int32, device="cuda").view(rows, pages)
    check(scores, 512, block_table=own, page_size=64)
    check(scores, 512, block_table=table.T.contiguous()[:6], page_size=64, starts=i32([0, 5, 10, 0, 3, 1]))


def test_beyond_two_to_the_31():
    wide = torch.zeros(5 * 2**30 // 2 + 8192, dtype=torch.bfloat16, device="cuda")
    scores = wide.as_strided((3, 5000), (5 * 2**28, 1))
    scores.copy_(torch.randn(3, 5000, device="cuda"))
    check(scores, 100)


def test_no_host_synchronisation():
    scores, lengths = torch.randn(4, 10000, device="cuda"), i32([0, 5, 10000, 9000])
    dsa.topk_indices(scores, 512, lengths=lengths)
    torch.cuda.set_sync_debug_mode("error")
    try:
        dsa.topk_indices(scores, 512, lengths=lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("cols", [9000, 40000])
def test_calls_that_follow_each_other_closely(cols):
    """A launch begins before the previous one ends. It must wait for its inputs, and for the memory that it writes."""

    def chain(topk):
        scores, picked = first.clone(), []
        for _ in range(30):
            picked.append(topk(scores, 512))
            scores.scatter_(1, picked[-1].long(), -5.0)
            picked.append(topk(topk(scores, 300).float(), 100))
        return picked

    first = torch.randn(5, cols, device="cuda")
    for got, expected in zip(chain(dsa.topk_indices), chain(lambda *given: selected(*given)[0])):
        assert torch.equal(got, expected)
