"""Drafters over two processes beside one: states, logits, and what every rank holds."""

import pytest
import torch

from dsa.testing import calc_diff
from dsa_layers import load_model
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.models.glm_moe_dsa import DraftedStates
from dsa_layers.parallel.placement import SHARDED_TOKENS
from tests.layers.parallel.processes import in_ranks

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


def elements(shapes):
    return sum(torch.Size(shape).numel() for shape in shapes.values())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v4", "deepseek_v32", "glm_moe_dsa"])
def test_ranks_compute_what_one_process_does(tiny_checkpoint, model):
    """Ranks have the same bits. The second checkpoint keeps its weights in FP8 and FP4, and its caches bytes."""
    assert CHUNKS[0] >= SHARDED_TOKENS > CHUNKS[1]
    directories = [tiny_checkpoint(model, quantized) for quantized in (False, True)]
    of_ranks = in_ranks(2, of_rank, directories)
    for (first, parts), (second, others) in zip(*of_ranks):
        assert parts == others
        assert all(torch.equal(mine, theirs) and mine.isfinite().all() for mine, theirs in zip(first, second))
    exact, quantized = (outcome(load_model(directory, **OPTIONS)) for directory in directories)
    (found, parts), (expected, whole) = of_ranks[0][0], exact
    assert parts.keys() == whole.keys() and elements(parts) < 0.8 * elements(whole)  # attention has all heads
    for ours, theirs in zip(found, expected):
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    # Some roundings to FP8 differ, and with random weights these choose other keys and experts.
    ours, theirs = of_ranks[0][1][0][-1], quantized[0][-1]
    assert calc_diff(ours, theirs) < 0.05
