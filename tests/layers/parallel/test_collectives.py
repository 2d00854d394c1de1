"""How often ranks talk in a pass: on the host a collective costs as much as many kernels, whatever it carries."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsa_layers import load_model
from dsa_layers.batch.prefill import Chunk, prefill_batch
from tests.layers.parallel.processes import in_ranks
from tests.layers.parallel.ways import WAYS, split_by

TOKENS = 512  # more than the tiny indexers select
# Of a pass: the embedding's sum, the last layer's rows, and the logits.
ENDS = 3
# Of an MLP of experts: rows, choice, sum. Of a dense one: rows, sum.
EXPERTS, DENSE = 3, 2
# What attention says for each kind of layer: keys; of heads queries, picks where the layer selects, and the sum, too.
# What a layer does not have, as picks where it selects nothing, makes it fewer.
MOST = {
    ("deepseek_v32", "queries"): 1,
    ("deepseek_v32", "heads"): 4,
    ("glm_moe_dsa", "queries"): 1,
    ("glm_moe_dsa", "heads"): 4,
    ("deepseek_v4", "queries"): 1,
    ("deepseek_v4", "heads"): 4,
}


class Collectives(TorchDispatchMode):
    """Counts them, by their names."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "c10d":
            self.found[str(function)] += 1
        return function(*arguments, **(options or {}))


@torch.inference_mode()
def said(ranks, cases):
    """{(model, way): (its layers' number, that of the dense ones, collectives of a long pass, of a step)}"""
    found = {}
    for (model_type, way), directory in cases.items():
        with split_by(way):
            model = load_model(directory, mesh=ranks, dtype=torch.bfloat16, progress=False)
            size, config = model.page_size, model.config
            pages = range(-(-TOKENS // size))
            cache = model.make_cache(len(pages))
            batch = prefill_batch([Chunk(TOKENS, 0, pages, 0)], size, "cpu")
            with Collectives() as collectives:
                model(torch.arange(TOKENS), batch, cache)
            step = prefill_batch([Chunk(1, TOKENS - 1, pages, 0)], size, "cpu")
            with Collectives() as of_step:
                model(torch.arange(1), step, cache)
            dense = getattr(config, "first_k_dense_replace", 0)
            found[model_type, way] = config.num_hidden_layers, dense, collectives.found, of_step.found
    return found


@pytest.fixture(scope="module")
def of_ranks(tiny_checkpoint):
    """All cases in the same processes, which are slow to start."""
    return in_ranks(2, said, {(model, way): tiny_checkpoint(model) for model, way in MOST})


@pytest.mark.parametrize(("model", "way"), MOST)
def test_collectives_of_a_pass(of_ranks, model, way):
    for of_rank in of_ranks:
        layers, dense, found, _ = of_rank[model, way]
        most = ENDS + layers * MOST[model, way] + dense * DENSE + (layers - dense) * EXPERTS
        # Ranks must talk in every layer: a count of nothing would be none of collectives.
        assert 2 * layers < found.total() <= most, found


@pytest.mark.parametrize(("model", "way"), MOST)
def test_collectives_of_a_step(of_ranks, model, way):
    """A sum for each attention and each MLP; beside them the embedding's sum and the logits."""
    for of_rank in of_ranks:
        layers, _, _, found = of_rank[model, way]
        assert found.total() == 2 * layers + 2, found


def test_all_ways_are_counted():
    assert {way for _, way in MOST} == WAYS.keys()
