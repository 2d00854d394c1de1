"""The compressor's reference against the definition, token by token, and its state against whole sequences."""

import pytest
import torch

from dsa import reference
from dsa.cases.elementwise import rms_normed, rotated
from tests.reference.common import assert_refused, i32

M, D, R = 4, 8, 4


def inputs(lengths, overlap, m=M, dtype=torch.float32):
    c = 2 * D if overlap else D
    total = sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return torch.randn(total, c).to(dtype), torch.randn(total, c).to(dtype), torch.randn(m, c), cu


def by_hand(kv, gate, ape, overlap):
    """All entries of one sequence, in float64. With `overlap`, an entry is also of the block before its own, of which
    the first D channels count."""
    m, kv = len(ape), kv.double()
    z = gate.double() + ape.double().repeat(len(kv) // m + 1, 1)[: len(kv)]
    entries = [kv.new_zeros(0, D)]
    for begin in range(0, len(kv) - m + 1, m):
        before, own = slice(begin - m, begin), slice(begin, begin + m)
        logits, values = z[own, -D:], kv[own, -D:]
        if overlap and begin:
            logits, values = torch.cat((z[before, :D], logits)), torch.cat((kv[before, :D], values))
        entries.append((logits.softmax(0) * values).sum(0, keepdim=True))
    return torch.cat(entries)


def assert_near(got, expected):
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lengths", [[0], [3], [4], [9, 1, 0, 16], [7, 8]])
def test_whole_sequences(lengths, overlap):
    kv, gate, ape, cu = inputs(lengths, overlap)
    starts = torch.zeros(len(lengths), dtype=torch.int32)
    entries, tokens = reference.compress_kv(kv, gate, ape, cu, starts, overlap=overlap)
    parts = [by_hand(kv[a:b], gate[a:b], ape, overlap) for a, b in zip(cu.tolist(), cu.tolist()[1:])]
    assert_near(entries, torch.cat(parts))
    assert tokens.tolist() == [a + i for a, n in zip(cu.tolist(), lengths) for i in range(M - 1, n, M)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunks", [[1] * 23, [23], [3, 1, 9, 10], [4, 4, 15], [5, 18]])
def test_chunks_continue_what_the_state_holds(chunks, overlap):
    """Two sequences, the second three tokens behind; state slots and rows that hold nothing yet are NaN."""
    kv, gate, ape, _ = inputs([23], overlap)
    state = torch.full((3, 2 * M if overlap else M, 2, kv.shape[1]), torch.nan)
    state_slots = torch.tensor([2, 0], dtype=torch.int32)
    got, done = [[], []], [0, 0]
    for n in chunks:
        sizes = [n, max(min(n, 20 - done[1]), 0)]
        rows = torch.cat([torch.arange(d, d + k) for d, k in zip(done, sizes)])
        cu = torch.tensor([0, sizes[0], sum(sizes)], dtype=torch.int32)
        starts = torch.tensor(done, dtype=torch.int32)
        new = kv[rows], gate[rows], ape, cu, starts, state, state_slots
        entries, tokens = reference.compress_kv(*new, overlap=overlap)
        for entry, token in zip(entries, tokens.tolist()):
            got[token >= sizes[0]].append(entry)
        done = [d + k for d, k in zip(done, sizes)]
    expected = by_hand(kv, gate, ape, overlap)
    assert_near(torch.stack(got[0]), expected)
    assert_near(torch.stack(got[1]), expected[:5])
    assert state[1].isnan().all()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [1, 2, 3, 5])
def test_tokens_that_are_taken_back(drafts, overlap):
    """Each pass has one token and drafts of the next ones, none or some of which are right. A state with a row more for
    each draft but one holds what the entries to come are made of; one with fewer does not."""
    kv, gate, ape, _ = inputs([60], overlap)
    expected = by_hand(kv, gate, ape, overlap)
    generator = torch.Generator().manual_seed(drafts)
    found = []
    for spare in (drafts - 1, *([drafts - 2] if drafts > 1 else [])):
        state = torch.full((1, (2 * M if overlap else M) + spare, 2, kv.shape[1]), torch.nan)
        got, done = {}, 0
        while done < 60:
            right = min(int(torch.randint(drafts + 1, (), generator=generator)), 59 - done)
            new = torch.cat((torch.arange(done, done + 1 + right), torch.full((drafts - right,), 59 - done // 2)))
            cu, starts = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1 + drafts], [done]))
            arguments = kv[new], gate[new], ape, cu, starts, state, torch.zeros(1, dtype=torch.int32)
            entries, tokens = reference.compress_kv(*arguments, overlap=overlap)
            got |= {done + t: entry for entry, t in zip(entries, tokens.tolist()) if t <= right}
            done += 1 + right
        found.append(torch.stack([got[i] for i in range(M - 1, 60, M)]))
    assert_near(found[0], expected)
    assert not any(torch.allclose(other.double(), expected) for other in found[1:])


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_are_those_of_the_formula(overlap):
    kv, gate, ape, cu = inputs([6, 9], overlap)
    tensors = [x.requires_grad_() for x in (kv, gate, ape)]
    entries, _ = reference.compress_kv(*tensors, cu, i32([0, 0]), overlap=overlap)
    expected = torch.cat([by_hand(kv[a:b], gate[a:b], ape, overlap) for a, b in ((0, 6), (6, 15))])
    got, wanted = (torch.autograd.grad(x.square().sum(), tensors) for x in (entries, expected))
    for x, y in zip(got, wanted):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def pages(kind):
    if kind == "index":
        return torch.full((3, 4, 1, D + 4), 7, dtype=torch.uint8)
    return torch.full((3, 4, 1, D), torch.nan, dtype=kind)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "index"])
@pytest.mark.parametrize("overlap", [False, True])
def test_writing(kind, overlap):
    kv, gate, ape, cu = inputs([9, 5], overlap, dtype=torch.bfloat16 if kind == torch.bfloat16 else torch.float32)
    starts, state_slots = i32([0, 0]), i32([0, 1])
    weight, angle = torch.rand(D) + 0.5, torch.randn(len(kv), R // 2)
    slots = torch.full((len(kv),), -1)
    slots[[3, 7, 12]] = torch.tensor([5, 2, 9])
    state = torch.zeros(2, 2 * M if overlap else M, 2, kv.shape[1])
    cache = pages(kind)
    reference.write_compressed_kv(
        *(kv, gate, ape, weight, angle.cos(), angle.sin(), cache, slots, cu, starts, state, state_slots),
        overlap=overlap,
    )
    entries, tokens = reference.compress_kv(kv, gate, ape, cu, starts, overlap=overlap)
    x = rms_normed(entries, weight, 1e-6)
    x = rotated(x, angle.cos()[tokens], angle.sin()[tokens]).float()
    if kind == "index":
        k, scale = reference.read_indexer_cache(cache, slots[tokens])
        k8, s8 = reference.per_token_cast_to_fp8(x, True, D, hadamard=True)
        assert torch.equal(k.float(), k8.float()) and torch.equal(scale, s8[:, 0])
        assert (reference.read_indexer_cache(cache, torch.tensor([0]))[0].view(torch.uint8) == 7).all()
    else:
        torch.testing.assert_close(cache.view(-1, D)[slots[tokens]], x.to(kind))
        untouched = torch.ones(12, dtype=torch.bool)
        untouched[[5, 2, 9]] = False
        assert cache.view(-1, D)[untouched].isnan().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": torch.randn(9, 3)}, r"gate: shape must be \[9, 8\], got \[9, 3\]"),
        ({"ape": torch.randn(4, 7)}, r"ape: shape must be \[m, 8\], got \[4, 7\]"),
        ({"ape": torch.randn(0, 8)}, "ape: must have rows and kv's channels"),
        ({"starts": torch.zeros(2, dtype=torch.int32)}, r"starts: shape must be \[1\], got \[2\]"),
        (
            {"state": torch.zeros(1, 3, 2, 8)},
            r"state: shape must be \[S, n, 2, 8\] with n at least 4, got \[1, 3, 2, 8\]",
        ),
        ({"state": None}, r"state: must be a torch\.Tensor, got NoneType"),
        ({"norm_weight": torch.ones(4)}, r"norm_weight: shape must be \[8\], got \[4\]"),
        ({"slots": torch.full((9,), 99)}, "slots: "),
        (
            {"cu_seqlens": i32([0, 10])},
            r"cu_seqlens: must not decrease, from at least 0 to at most kv's T=9, got \[0, 10\]",
        ),
        ({"cu_seqlens": i32([-1, 9])}, r"cu_seqlens: must not decrease, .* got \[-1, 9\]"),
        ({"cu_seqlens": i32([9, 3])}, r"cu_seqlens: must not decrease, .* got \[9, 3\]"),
        ({"starts": i32([-1])}, r"starts: must be at least 0, and 0 without a state, got \[-1\]"),
        ({"state_slots": i32([-1])}, r"state_slots: must be from 0 to 0, got \[-1\]"),
        ({"state_slots": i32([1])}, r"state_slots: must be from 0 to 0, got \[1\]"),
        ({"cache": torch.zeros(1, 4, 1, 9)}, "cache: must have entries of 8 channels, got 9"),
        (
            {"cache": torch.zeros(1, 4, 1, 10, dtype=torch.uint8)},
            "cache: the last dimension of a byte cache must be 656",
        ),
        ({"cos": torch.ones(9, 5), "sin": torch.ones(9, 5)}, "kv: the last dimension must be at least 10 for these"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    kv, gate, ape, cu = inputs([9], False)
    arguments = {
        "kv": kv, "gate": gate, "ape": ape, "norm_weight": torch.ones(D), "cos": torch.ones(9, 2),
        "sin": torch.zeros(9, 2), "cache": torch.zeros(3, 4, 1, D), "slots": torch.full((9,), -1), "cu_seqlens": cu,
        "starts": torch.zeros(1, dtype=torch.int32), "state": torch.zeros(1, 4, 2, D),
        "state_slots": torch.zeros(1, dtype=torch.int32),
    }  # fmt: skip
    assert_refused(message, reference.write_compressed_kv, **arguments | changes, overlap=False)
    assert not arguments["cache"].any() and not arguments["state"].any()


@pytest.mark.parametrize(
    ("starts", "state", "message"),
    [
        ([0, 3], (), r"starts: must be at least 0, and 0 without a state, got \[0, 3\]"),
        ([0, 0], (torch.zeros(1, 4, 2, D),), "state, state_slots: must be given together, got one of them"),
    ],
)
def test_what_a_state_is_needed_for(starts, state, message):
    assert_refused(message, reference.compress_kv, *inputs([5, 4], False), i32(starts), *state, overlap=False)
