"""The compressor's reference: sizes, chunks, tokens that are taken back, gradients, wrong arguments."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.compressor import compressed
from dsa.reference import compress_kv
from tests.reference.common import assert_refused, i32

COMPRESS, WHOLE, *_ = cases_of("compressed_kv")
M, D = 4, 8
both = pytest.mark.parametrize("overlap", [False, True])


@both
@pytest.mark.parametrize("lengths", [[0], [3], [4], [9, 1, 0, 16], [7, 8]])
def test_against_float64(lengths, overlap):
    kind = {"lengths": lengths, "c": 16, "overlap": overlap, "dtype": torch.float32}
    WHOLE.verify(**kind)
    for start in range(9):
        COMPRESS.verify(starts=[start] * len(lengths), spare=start % 3, **kind)


def sequence(length, overlap):
    """One sequence, its entries by the formula, and a state without tokens."""
    given = WHOLE.arguments(lengths=[length], c=2 * D if overlap else D, overlap=overlap, dtype=torch.float32)
    state = torch.full((1, 2 * M if overlap else M, 2, given["kv"].shape[1]), torch.nan)
    return given, compressed(given)[0], state


def run(given, rows, start, state):
    part = {"kv": given["kv"][rows], "gate": given["gate"][rows], "cu_seqlens": i32([0, len(rows)])}
    return compress_kv(**given | part | {"starts": i32([start]), "state": state, "state_slots": i32([0])})


@both
@pytest.mark.parametrize("chunks", [[1] * 23, [23], [3, 1, 9, 10], [4, 4, 15], [5, 18]])
def test_chunks_continue_from_the_state(chunks, overlap):
    given, expected, state = sequence(23, overlap)
    found, done = [], 0
    for n in chunks:
        found.append(run(given, range(done, done + n), done, state)[0])
        done += n
    torch.testing.assert_close(torch.cat(found).double(), expected, rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("drafts", [1, 2, 3, 5])
def test_tokens_that_are_taken_back(drafts, overlap):
    """Each pass has one token and some drafts, of which the first ones may be right. The state needs one more row for
    each draft after the first."""
    given, expected, state = sequence(60, overlap)
    generator = torch.Generator().manual_seed(drafts)
    for spare in (drafts - 1, *([drafts - 2] if drafts > 1 else [])):
        rows = torch.full((1, state.shape[1] + spare, *state.shape[2:]), torch.nan)
        got, done = {}, 0
        while done < 60:
            right = min(int(torch.randint(drafts + 1, (), generator=generator)), 59 - done)
            new = [*range(done, done + 1 + right)] + [59 - done // 2] * (drafts - right)
            entries, tokens = run(given, new, done, rows)
            got |= {done + t: entry for entry, t in zip(entries, tokens.tolist()) if t <= right}
            done += 1 + right
        entries = torch.stack([got[i] for i in range(M - 1, 60, M)]).double()
        assert torch.allclose(entries, expected, rtol=1e-5, atol=1e-6) == (spare == drafts - 1)


@both
def test_gradients_are_those_of_the_formula(overlap):
    given = WHOLE.arguments(lengths=[6, 9], c=2 * D if overlap else D, overlap=overlap, dtype=torch.float32)
    tensors = [given[name].requires_grad_() for name in ("kv", "gate", "ape")]
    (entries, _), (expected, _) = compress_kv(**given), compressed(given)
    got, wanted = (torch.autograd.grad(x.square().sum(), tensors) for x in (entries, expected))
    for x, y in zip(got, wanted):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def inputs(lengths):
    given = WHOLE.arguments(lengths=lengths, c=D, overlap=False, dtype=torch.float32)
    return [given[name] for name in ("kv", "gate", "ape", "cu_seqlens")]


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
    kv, gate, ape, cu = inputs([9])
    arguments = {
        "kv": kv, "gate": gate, "ape": ape, "norm_weight": torch.ones(D), "cos": torch.ones(9, 2),
        "sin": torch.zeros(9, 2), "cache": torch.zeros(3, 4, 1, D), "slots": torch.full((9,), -1), "cu_seqlens": cu,
        "starts": torch.zeros(1, dtype=torch.int32), "state": torch.zeros(1, 4, 2, D),
        "state_slots": torch.zeros(1, dtype=torch.int32),
    }  # fmt: skip
    assert_refused(message, dsa.write_compressed_kv, **arguments | changes, overlap=False)
    assert not arguments["cache"].any() and not arguments["state"].any()


@pytest.mark.parametrize(
    ("starts", "state", "message"),
    [
        ([0, 3], (), r"starts: must be at least 0, and 0 without a state, got \[0, 3\]"),
        ([0, 0], (torch.zeros(1, 4, 2, D),), "state, state_slots: must be given together, got one of them"),
    ],
)
def test_what_a_state_is_needed_for(starts, state, message):
    assert_refused(message, dsa.compress_kv, *inputs([5, 4]), i32(starts), *state, overlap=False)
