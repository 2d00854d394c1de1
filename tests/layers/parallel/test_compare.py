"""The check that ranks select the same keys: silent where they do, and not where one is made to differ."""

import os

import pytest
import torch

from dsa_layers import load_model
from dsa_layers.batch.sequence_batch import SequenceBatch
from tests.layers.parallel.processes import in_ranks

TOKENS = [2 + i * i % 2000 for i in range(300)]
LAYERS = {"deepseek_v32": "model.layers.2.self_attn.indexer", "deepseek_v4": "layers.1.attn.indexer"}


def passes(ranks, directories):
    """What a pass says of ranks that agree, and of a second rank whose index queries are others in one layer."""
    os.environ["DSA_COMPARE_RANKS"] = "1"
    said = {}
    for name, directory in directories.items():
        model = load_model(directory, mesh=ranks, dtype=torch.float32, dequantize=True, progress=False)
        for changed in (False, True):
            if changed and ranks.rank == 1:
                indexer = model.get_submodule(LAYERS[name])
                indexer.wq_b.weight.data.neg_()
            try:
                with torch.inference_mode():
                    model(torch.tensor(TOKENS), SequenceBatch.without_cache([len(TOKENS)]))
                said[name, changed] = None
            except RuntimeError as error:
                said[name, changed] = str(error)
    return said


@pytest.fixture(scope="module")
def directories(tiny_checkpoint):
    return {name: tiny_checkpoint(name, quantized=False) for name in LAYERS}


@pytest.mark.slow
def test_other_picks_are_noticed_on_all_ranks(directories):
    first, second = in_ranks(2, passes, directories)
    assert first == second
    for name, layer in LAYERS.items():
        assert first[name, False] is None
        assert first[name, True].startswith(f"{layer}: ranks have selected other keys for token ")
