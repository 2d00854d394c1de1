"""How often ranks communicate in a pass: on the host each collective costs as much as many kernels."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsa_layers import load_model
from dsa_layers.batch.prefill import Chunk, prefill_batch
from tests.layers.parallel.processes import in_ranks
from tests.layers.parallel.ways import WAYS, split_by

TOKENS = 512  # more than the tiny indexers select
ENDS = 4  # two for the embedding's sum, the last layer's rows, and the logits
EXPERTS, DENSE = 3, 2  # rows, choice of experts and sum; rows and sum
# At most, in attention: keys; with a rank's heads queries, selected keys and the sum, too.
ATTENTION = {"queries": 1, "heads": 4}


class Collectives(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function.namespace == "c10d"
        return function(*arguments, **(options or {}))


@torch.inference_mode()
def counts(ranks, directory):
    """{way of splitting: (layers, dense layers, collectives of a long pass, collectives of a decode step)}"""
    found = {}
    for way in WAYS:
        with split_by(way):
            model = load_model(directory, mesh=ranks, dtype=torch.bfloat16, progress=False)
        cache = model.make_cache(-(-TOKENS // model.page_size))
        layers, dense = model.config.num_hidden_layers, getattr(model.config, "first_k_dense_replace", 0)
        of_passes = []
        for new in (TOKENS, 1):
            chunk = Chunk(new, TOKENS - new, range(cache.allocator.num_pages), 0)
            with Collectives() as collectives:
                model(torch.arange(new), prefill_batch([chunk], model.page_size, "cpu"), cache)
            of_passes.append(collectives.count)
        found[way] = layers, dense, *of_passes
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa", "deepseek_v4"])
def test_collectives_are_few(tiny_checkpoint, model):
    for of_rank in in_ranks(2, counts, tiny_checkpoint(model)):
        for way, (layers, dense, long_pass, step) in of_rank.items():
            most = ENDS + layers * ATTENTION[way] + dense * DENSE + (layers - dense) * EXPERTS
            assert 2 * layers < long_pass <= most, way
            assert step == 2 * layers + 2, way  # sums of attention, MLPs and the embedding, and the logits
