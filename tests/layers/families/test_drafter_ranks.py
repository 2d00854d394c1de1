"""Drafters over two processes beside one: states, logits, and what every rank holds."""

import pytest
import torch

from dsa_layers import load_model
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.families.registry import family, model_types
from dsa_layers.families.sparse_mla.drafted_states import DraftedStates
from dsa_layers.parallel.rows import SHARED_ROWS
from tests.layers.parallel.processes import in_ranks

FAMILIES = [model for model in model_types() if family(model).drafter is not None]
OPTIONS = {"dtype": torch.float32, "progress": False, "drafter": True}
# More tokens than are selected; ranks have a share each of the first pass's rows, and all of the others'.
TOKENS, CHUNKS = torch.tensor([2 + i * i % 2000 for i in range(303)]), [270, 30, 1]


def values(states):
    return states.values if isinstance(states, DraftedStates) else states


@torch.inference_mode()
def outcome(model):
    """(the target's states, the drafter's, logits of both) over pages and a further step's states; the same of a pass
    without a cache; weights' shapes."""
    caches = [m.make_cache(4, 256, state_slots=2) for m in (model, model.drafter)]
    found, done = [], 0
    for n in CHUNKS:
        batch = SequenceBatch.paged([n], [done + n], [[2, 0]], 256, state_slots=[1])
        rows = slice(done, done + n)
        states = model.states(TOKENS[rows], batch, caches[0])
        drafted = model.drafter(TOKENS[1:][rows], states, batch, caches[1])
        found += [states, values(drafted), model.logits(states), model.drafter.logits(drafted)]
        done += n
    batch = SequenceBatch.paged([1], [done + 1], [[2, 0]], 256, state_slots=[1])
    found.append(values(model.drafter(TOKENS[:1], drafted[-1:], batch, caches[1])))
    batch = SequenceBatch.without_cache([200, 100])
    states = model.states(TOKENS[:300], batch)
    found += [states, values(model.drafter(TOKENS[1:301], states, batch)), model(TOKENS[:300], batch)]
    weights = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if "drafter." in name}
    return found, weights


def of_rank(ranks, directories):
    return [outcome(load_model(directory, mesh=ranks, **OPTIONS)) for directory in directories]


@pytest.fixture(scope="module")
def cases(tiny_checkpoint):
    """{(family, quantised): (its directory, what each rank has found)}, all models in the same processes, which are
    slow to start."""
    made = {(model, quantized): tiny_checkpoint(model, quantized) for model in FAMILIES for quantized in (False, True)}
    of_ranks = in_ranks(2, of_rank, list(made.values()))
    return {case: (directory, *found) for (case, directory), *found in zip(made.items(), *of_ranks)}


@pytest.mark.parametrize("model", FAMILIES)
def test_ranks_compute_what_one_process_does(cases, model):
    directory, (first, parts), (second, others) = cases[model, False]
    assert CHUNKS[0] >= SHARED_ROWS > CHUNKS[1]
    whole, shapes = outcome(load_model(directory, **OPTIONS))
    assert parts == others and parts.keys() == shapes.keys()
    held = [sum(torch.Size(shape).numel() for shape in of.values()) for of in (parts, shapes)]
    assert held[0] < 0.8 * held[1]  # attention has all heads
    for mine, theirs, expected in zip(first, second, whole):
        assert torch.equal(mine, theirs)  # bit for bit
        assert mine.shape == expected.shape
        assert (mine - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("model", FAMILIES)
def test_fp8_and_fp4(cases, model):
    """As they are stored, and bytes in the caches: the ranks have the same bits."""
    _, (first, _), (second, _) = cases[model, True]
    assert all(torch.equal(mine, theirs) and mine.isfinite().all() for mine, theirs in zip(first, second))
