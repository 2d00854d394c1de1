"""Parity of all families' drafters with their formulas (plain_drafters.py), in fp32."""

import pytest
import torch

from dsa_layers import DecodeBatch, SequenceBatch, load_model
from dsa_layers.models.registry import FAMILIES
from tests.layers.generation.families import has_drafter
from tests.layers.io.stand_ins import changed
from tests.layers.models.parity import poisoned_cache
from tests.layers.models.plain_drafters import PLAIN, PlainMLADrafter, values
from tests.reference.common import assert_refused

TOLERANCE = 2e-5
PAGE = 128  # tokens per page
# Every family that has a drafter, and GLM-5.2 with a drafter that selects keys in every step, as in GLM-5.
CASES = [(model, {}) for model in FAMILIES if has_drafter(model)]
CASES += [("glm_moe_dsa", {"index_share_for_mtp_iteration": False})]
TOKENS = torch.randint(0, 2048, (190,), generator=torch.Generator().manual_seed(1))
LENGTHS = [160, 9]


@pytest.fixture(scope="module", params=CASES, ids=str)
def drafters(request, tiny_checkpoint, tmp_path_factory):
    """Return (a model with its drafter, the drafter's reference implementation)."""
    model_type, changes = request.param
    directory = tiny_checkpoint(model_type, quantized=False)
    if changes:
        directory = changed(directory, tmp_path_factory.mktemp("drafter"), **changes)
    model = load_model(directory, dtype=torch.float32, drafter=True, progress=False)
    return model, PLAIN.get(model_type, PlainMLADrafter)(directory)


def shares_picks(model):
    return getattr(model.config, "index_share_for_mtp_iteration", False)


def assert_same(got, expected):
    assert got.shape == expected.shape and (got - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert expected.std() > 0.3  # else agreement means little


@torch.no_grad()
def test_drafts_of_whole_sequences_follow_the_formulas(drafters):
    model, plain = drafters
    batch = SequenceBatch.without_cache(LENGTHS)
    of_target = model.states(TOKENS[:169], batch)
    assert torch.allclose(model.logits(of_target), model(TOKENS[:169], batch, all_tokens=True), atol=TOLERANCE)
    first = model.drafter(TOKENS[1:170], of_target, batch)
    steps = [first]
    if shares_picks(model):
        told = "^cache: must be the first step's, .* got none in the step that gave"
        assert_refused(told, model.drafter, TOKENS[2:171], first, batch)
    else:
        steps.append(model.drafter(TOKENS[2:171], first, batch))
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        expected = of_target[rows]
        for step, got in enumerate(steps, start=1):
            joined = plain.join(TOKENS[start + step : start + step + length], expected)
            expected = plain.states(joined)
            assert_same(values(got[rows]), expected)
            assert_same(model.drafter.logits(got[rows]), plain.logits(expected))
        start += length


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[133, 20, 1, 1, 1], [1, 1, 154], [5]])
def test_drafts_over_pages_follow_the_formulas(drafters, chunks):
    model, plain = drafters
    pages, slot = [5, 0, 3], 2
    of_target, cache = (poisoned_cache(one, 8, PAGE) for one in (model, model.drafter))

    def batch(new, total):
        return SequenceBatch.paged([new], [total], [pages], PAGE, state_slots=[slot])

    def decode_batch(new, total):
        table, length, slots = (torch.tensor(values, dtype=torch.int32) for values in ([pages], [total], [slot]))
        return DecodeBatch(table, PAGE, length, total, slots, next_n=new)

    drafted, states, done = [], [], 0
    for n in chunks:
        rows = slice(done, done + n)
        both = batch(n, done + n)
        states.append(model.states(TOKENS[rows], both, of_target))
        drafted.append(model.drafter(TOKENS[rows.start + 1 : rows.stop + 1], states[-1], both, cache))
        done += n
    joined = plain.join(TOKENS[1 : done + 1], torch.cat(states))
    expected = plain.states(joined)
    assert_same(torch.cat(list(map(values, drafted))), expected)

    def further(last, joined, expected, total):
        token = model.drafter.logits(last[-1:]).argmax(-1)
        assert token == plain.logits(expected[-1:]).argmax(-1)
        last = model.drafter(token, last[-1:], decode_batch(1, total), cache)
        row = plain.join(token, expected[-1:])
        if shares_picks(model):  # later steps attend to the keys that the first step selected
            expected = plain.further(joined, row, total - 1)
        else:
            joined = torch.cat((joined, row))
            expected = plain.states(joined)
        assert_same(values(last), expected[-1:])
        return last, joined, expected

    last, draft, guesses = further(drafted[-1], joined, expected, done + 1)
    last, draft, guesses = further(last, draft, guesses, done + 2)
    further(last, draft, guesses, done + 3)

    # The target runs on the next two of TOKENS, whatever was drafted. The drafter computes their positions again, with
    # the target's states, and overwrites its cache there.
    rows = slice(done, done + 2)
    both = decode_batch(2, done + 2)
    states = model.states(TOKENS[rows], both, of_target)
    got = model.drafter(TOKENS[rows.start + 1 : rows.stop + 1], states, both, cache)
    joined = torch.cat((joined, plain.join(TOKENS[rows.start + 1 : rows.stop + 1], states)))
    expected = plain.states(joined)
    assert_same(values(got), expected[rows])
    # If only the first of the two tokens is accepted, drafting continues from the first row.
    further(got[:1], joined[:-1], expected[:-1], done + 2)


def test_states_of_other_shapes_are_refused(drafters):
    model, _ = drafters
    batch = SequenceBatch.without_cache([4])
    states = model.states(TOKENS[:4], batch)
    row = ", ".join(map(str, states.shape[1:]))
    for wrong in (states[:3], states.flatten(1)[:, :-1], states[:, None]):
        told = rf"^states: must be \[4, {row}\], a row for each of tokens \[T\], got "
        assert_refused(told, model.drafter, TOKENS[1:5], wrong, batch)
