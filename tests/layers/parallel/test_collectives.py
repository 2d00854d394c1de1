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
MOST = {"queries": 1, "heads": 4}


class Collectives(TorchDispatchMode):
    """Counts them, by their names."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "c10d":
            self.found[str(function)] += 1
        return function(*arguments, **(options or {}))


def collectives(model, cache, new, total):
    """Those of a pass over the last `new` of a sequence's tokens."""
    chunk = Chunk(new, total - new, range(cache.allocator.num_pages), 0)
    with Collectives() as counted:
        model(torch.arange(new), prefill_batch([chunk], model.page_size, "cpu"), cache)
    return counted.found


@torch.inference_mode()
def said(ranks, directory):
    """By the way of splitting: (layers' number, that of the dense ones, collectives of a long pass, of a step)."""
    found = {}
    for way in WAYS:
        with split_by(way):
            model = load_model(directory, mesh=ranks, dtype=torch.bfloat16, progress=False)
            cache = model.make_cache(-(-TOKENS // model.page_size))
            layers, dense = model.config.num_hidden_layers, getattr(model.config, "first_k_dense_replace", 0)
            passes = collectives(model, cache, TOKENS, TOKENS), collectives(model, cache, 1, TOKENS)
            found[way] = layers, dense, *passes
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa", "deepseek_v4"])
def test_collectives_are_few(tiny_checkpoint, model):
    for of_rank in in_ranks(2, said, tiny_checkpoint(model)):
        for way, (layers, dense, long_pass, step) in of_rank.items():
            most = ENDS + layers * MOST[way] + dense * DENSE + (layers - dense) * EXPERTS
            # Ranks must talk in every layer: a count of nothing would be none of collectives.
            assert 2 * layers < long_pass.total() <= most, (way, long_pass)
            # A sum for each attention and each MLP; beside them the embedding's sum and the logits.
            assert step.total() == 2 * layers + 2, (way, step)
