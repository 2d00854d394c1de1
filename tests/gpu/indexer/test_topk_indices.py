"""topk_indices on the GPU, for every variant of the kernel: distributions of scores, misleading samples, rows of
different lengths, slots, strides, and launches that overlap."""

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
from tests.gpu.attention import int32
from tests.gpu.op_checks import replays

CASE, _, INTO = cases_of("topk_indices")
INF, NAN = math.inf, math.nan
SIZES = [(3, 5000), (2, 20000), (1, 131072), (7, 4097), (2, 8192)]
CHOOSE = topk_config.choose_config


@pytest.fixture(params=topk_config.CONFIGS, ids=lambda c: f"{c.threads}-{c.tile}-{c.cluster}")
def config(request, monkeypatch):
    """Use each variant in turn. For shapes that the variant does not support, the op chooses as usual."""
    cfg = request.param

    def choose(rows, vectors, k, width, multiprocessors):
        fits = cfg.tile > 0 or vectors <= cfg.resident_vectors(width)
        return cfg if fits and cfg.takes(k) else CHOOSE(rows, vectors, k, width, multiprocessors)

    monkeypatch.setattr(topk_config, "choose_config", choose)
    forget_calls()
    yield cfg
    forget_calls()


def most(cfg):
    return max(k for k in (1024, 2048, 4096) if cfg.takes(k))


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


@pytest.mark.parametrize(("rows", "cols"), SIZES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_distributions(config, distribution, rows, cols):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [512, 2048])
@pytest.mark.parametrize("sorted_", [False, True])
def test_ragged_rows(config, sorted_, k, dtype):
    cols = 40000
    scores, starts = torch.randn(64, cols, device="cuda").to(dtype), torch.randint(0, cols, (64,), device="cuda").int()
    lengths = (torch.rand(64, device="cuda") ** 3 * (cols - starts)).int()
    starts[:4], lengths[:8] = 7, int32([0, 1, 2, 511, 512, 513, -5, cols])
    starts[8:14] = int32([-3, -(2**30), cols, cols - 1, 2**31 - 1, cols + 5])
    lengths[8:14] = int32([100, 2**31 - 1, 5, 5, 5, 2**31 - 1])
    for first in (starts, None, starts.clamp(-100, cols + 100)):
        check(scores, k, starts=first, lengths=lengths, sorted=sorted_)


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("sorted_", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [*SIZES, (5, 0)])
def test_into_a_part_of_a_buffer(config, rows, cols, sorted_, values):
    scores, lengths = torch.randn(rows, cols, device="cuda"), torch.randint(0, cols + 1, (rows,), device="cuda").int()
    for k, before, after in ((1, 0, 0), (512, 4, 4), (512, 1, 2), (most(config), 3, 0)):
        buffer = torch.full((rows + 2, before + k + after), 77, dtype=torch.int32, device="cuda")
        part = buffer[1:-1, before : before + k]
        given = arguments(scores, k, lengths=lengths, sorted=sorted_, return_values=values, out=part)
        found = INTO.results(given)
        assert found[0] is part
        INTO.check(given, found)
        part.fill_(77)
        assert (buffer == 77).all()


@pytest.mark.parametrize("paged", [False, True])
def test_graph_replay_into_a_part_of_a_buffer(paged):
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


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("page_size", [64, 1, 7, 100])
def test_slots(config, page_size, by_value):
    scores, table = torch.randn(6, 30000, device="cuda"), torch.randperm(938, device="cuda").int().view(2, 469)
    table[:, 5], table[0, 9], table[1, 3] = int32([-1, -(2**31)]), 2**31 - 1, 2**25
    paging, rows = {"page_size": page_size, "sorted": by_value}, int32([0, 1, 0, 1, -1, 2])
    check(scores, 512, lengths=int32([30000, 20000, 3, 0, 500, 600]), block_table=table, row_to_seq=rows, **paging)
    check(scores, 512, block_table=table[rows.clamp(0, 1).long()], starts=int32([0, 5, 10, 0, 3, 1]), **paging)


@pytest.mark.parametrize("cols", [9000, 40000])
def test_calls_that_follow_each_other_closely(cols):
    """A launch can begin before the previous launch ends. It must wait before it reads results of the earlier launch,
    and before it overwrites memory that the earlier launch still reads."""

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
