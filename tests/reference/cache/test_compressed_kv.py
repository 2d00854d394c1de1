"""The compressor's reference against the definition, token by token, and its state against whole sequences."""

import math

import pytest
import torch

from dsa import reference

M, D, R = 4, 8, 4


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def inputs(lengths, overlap, m=M, dtype=torch.float32):
    c = 2 * D if overlap else D
    total = sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return torch.randn(total, c).to(dtype), torch.randn(total, c).to(dtype), torch.randn(m, c), cu


def by_hand(kv, gate, ape, overlap):
    """All entries of one sequence, from the formula."""
    m, entries = len(ape), []
    for i in range(len(kv) // m):
        entry = []
        for channel in range(D):
            slots = []
            if overlap and i > 0:
                slots += [(p, channel) for p in range((i - 1) * m, i * m)]
            slots += [(p, channel + D * overlap) for p in range(i * m, (i + 1) * m)]
            z = [gate[p, c].item() + ape[p % m, c].item() for p, c in slots]
            top = max(z)
            w = [math.exp(x - top) for x in z]
            entry.append(sum(a * kv[p, c].item() for a, (p, c) in zip(w, slots)) / sum(w))
        entries.append(entry)
    return torch.tensor(entries).reshape(-1, D)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lengths", [[0], [3], [4], [9, 1, 0, 16], [7, 8]])
def test_whole_sequences(lengths, overlap):
    kv, gate, ape, cu = inputs(lengths, overlap)
    starts = torch.zeros(len(lengths), dtype=torch.int32)
    entries, tokens = reference.compress_kv(kv, gate, ape, cu, starts, overlap=overlap)
    parts = [by_hand(kv[a:b], gate[a:b], ape, overlap) for a, b in zip(cu.tolist(), cu.tolist()[1:])]
    torch.testing.assert_close(entries, torch.cat(parts))
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
    torch.testing.assert_close(torch.stack(got[0]), expected)
    torch.testing.assert_close(torch.stack(got[1]), expected[:5])
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
    torch.testing.assert_close(found[0], expected)
    assert not any(torch.allclose(other, expected) for other in found[1:])


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients(overlap):
    kv, gate, ape, cu = (x.double() if x.is_floating_point() else x for x in inputs([6, 9], overlap))
    starts = torch.zeros(2, dtype=torch.int32)
    kv, gate, ape = kv.float(), gate.float(), ape.float()
    for x in (kv, gate, ape):
        x.requires_grad_()
    entries, _ = reference.compress_kv(kv, gate, ape, cu, starts, overlap=overlap)
    entries.square().sum().backward()
    assert all(x.grad.abs().sum() > 0 for x in (kv, gate, ape))
    # The tokens behind the last whole block take no part.
    assert not kv.grad[4:6].any() or overlap
    assert not kv.grad[14].any()


def pages(kind):
    if kind == "index":
        return torch.full((3, 4, 1, D + 4), 7, dtype=torch.uint8)
    return torch.full((3, 4, 1, D), torch.nan, dtype=kind)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "index"])
@pytest.mark.parametrize("overlap", [False, True])
def test_writing(kind, overlap):
    kv, gate, ape, cu = inputs([9, 5], overlap, dtype=torch.bfloat16 if kind == torch.bfloat16 else torch.float32)
    starts, state_slots = torch.tensor([0, 0], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
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
    x = entries / (entries.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    a, b = x[:, D - R :: 2], x[:, D - R + 1 :: 2]
    cos, sin = angle.cos()[tokens], angle.sin()[tokens]
    x[:, D - R :] = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(1)
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
            {"cu_seqlens": int32(0, 10)},
            r"cu_seqlens: must not decrease, from at least 0 to at most kv's T=9, got \[0, 10\]",
        ),
        ({"cu_seqlens": int32(-1, 9)}, r"cu_seqlens: must not decrease, .* got \[-1, 9\]"),
        ({"cu_seqlens": int32(9, 3)}, r"cu_seqlens: must not decrease, .* got \[9, 3\]"),
        ({"starts": int32(-1)}, r"starts: must be at least 0, and 0 without a state, got \[-1\]"),
        ({"state_slots": int32(-1)}, r"state_slots: must be from 0 to 0, got \[-1\]"),
        ({"state_slots": int32(1)}, r"state_slots: must be from 0 to 0, got \[1\]"),
        ({"cache": torch.zeros(1, 4, 1, 9)}, "cache: must have entries of 8 channels, got 9"),
        (
            {"cache": torch.zeros(1, 4, 1, 10, dtype=torch.uint8)},
            "cache: the last dimension of a byte cache must be 656",
        ),
        ({"cos": torch.ones(9, 5), "sin": torch.ones(9, 5)}, "kv: the last dimension must be at least 10 for these"),
    ],
)
def test_errors(changes, message):
    kv, gate, ape, cu = inputs([9], False)
    arguments = {
        "kv": kv, "gate": gate, "ape": ape, "norm_weight": torch.ones(D), "cos": torch.ones(9, 2),
        "sin": torch.zeros(9, 2), "cache": torch.zeros(3, 4, 1, D), "slots": torch.full((9,), -1), "cu_seqlens": cu,
        "starts": torch.zeros(1, dtype=torch.int32), "state": torch.zeros(1, 4, 2, D),
        "state_slots": torch.zeros(1, dtype=torch.int32),
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=message):
        reference.write_compressed_kv(**(arguments | changes), overlap=False)
    assert not arguments["cache"].any() and not arguments["state"].any()


def test_what_a_state_is_needed_for():
    kv, gate, ape, cu = inputs([5, 4], False)
    with pytest.raises(ValueError, match=r"starts: must be at least 0, and 0 without a state, got \[0, 3\]"):
        reference.compress_kv(kv, gate, ape, cu, int32(0, 3), overlap=False)
    with pytest.raises(ValueError, match="state, state_slots: must be given together, got one of them"):
        reference.compress_kv(kv, gate, ape, cu, int32(0, 0), torch.zeros(1, 4, 2, D), overlap=False)
