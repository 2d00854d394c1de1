"""Parity of GLM-5 with transformers' model: an indexer in every layer, and layers that share selected keys."""

from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from dsa_layers import SequenceBatch, load_model
from tests.layers.models import hf_models
from tests.layers.models.parity import ParityTests


class TestEveryLayerHasAnIndexer(ParityTests):
    build = staticmethod(hf_models.glm_moe_dsa)
    indexed: ClassVar = {0, 1, 2, 3}


class TestIndexShare(ParityTests):
    build = staticmethod(partial(hf_models.glm_moe_dsa, **hf_models.SHARED))
    indexed: ClassVar = {0, 1, 4}

    def test_shared_layers_have_no_index_pages(self, models):
        cache = models[1].make_cache(8, 16)
        assert [cache.layer(i).index is None for i in range(6)] == [False, False, True, True, False, True]
        latent, index = 32 + 16, 32
        assert cache.nbytes == 4 * 8 * 16 * (6 * latent + 3 * index)

    @pytest.mark.parametrize("impl", CheckpointImpl)
    def test_checkpointed_layers_have_the_same_gradients(self, impl, tmp_path):
        """The backward pass recomputes a layer after later layers have selected other keys."""
        self.build(tmp_path)
        tokens, batch = torch.arange(71) * 97 % 251, SequenceBatch.without_cache([48, 23])
        gradients = []
        for wrap in (lambda layer: layer, lambda layer: checkpoint_wrapper(layer, impl)):
            model = load_model(tmp_path, dtype=torch.float32, trainable=True, progress=False)
            model.model.layers = nn.ModuleList(map(wrap, model.model.layers))
            model(tokens, batch, all_tokens=True).square().mean().backward()
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        for expected, got in zip(*gradients, strict=True):
            assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
