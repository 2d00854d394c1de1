"""DeepSeek-V4 against transformers' own: windows, rings, entries, their state and their selection.

Every kind of layer is there; windows are of 8 tokens, entries of 4 and 16.
"""

from typing import ClassVar

import torch

from dsa_layers.batch.sequence_batch import SequenceBatch
from tests.layers.families import hf_models
from tests.layers.families.parity import ParityTests, assert_parity


class TestDeepseekV4(ParityTests):
    page_size = 32
    lengths: ClassVar = [1, 3, 4, 5, 8, 15, 16, 17, 33, 70]
    chunks: ClassVar = [[1] * 70, [70], [5, 7, 13, 1, 1, 21, 22], [16] * 4 + [6], [3, 2, 12, 30, 1, 1, 1, 20]]

    @staticmethod
    def build(directory):
        return hf_models.deepseek_v4(directory)

    @torch.no_grad()
    def test_every_part_matters(self, models, text):
        """What the other tests rest on: without one of these the logits would be others."""
        ours = models[1]
        tokens, expected = text

        def changes(module, name, value):
            kept = getattr(module, name)
            setattr(module, name, value)
            got = ours(tokens[0], SequenceBatch.without_cache([70]), all_tokens=True)
            setattr(module, name, kept)
            return (got - expected[0]).abs().max() > 0.01

        csa, hca = ours.layers[1].attn, ours.layers[2].attn
        assert changes(csa.indexer, "top_k", 64)
        assert changes(csa, "compressor", None) and changes(hca, "compressor", None)
        assert changes(hca, "window", 16)
        assert changes(csa, "attn_sink", torch.nn.Parameter(torch.zeros_like(csa.attn_sink)))
        assert changes(ours.layers[2].ffn.experts, "limit", None) or changes(
            ours.layers[2].ffn.shared_experts, "limit", None
        )
        assert changes(ours.layers[2].hc_attn, "iterations", 1)


def test_another_schedule_of_layers(tmp_path):
    """Only windows and heavy compression, plain rope, every layer's experts routed, two streams."""
    changes = {
        "compress_ratios": [128, 0, 128], "num_hidden_layers": 3, "num_hash_layers": 0, "hc_mult": 2,
        "rope_parameters": {"rope_type": "default"}, "compress_rope_theta": 5e4, "routed_scaling_factor": 0.7,
    }  # fmt: skip
    assert_parity(hf_models.deepseek_v4, tmp_path, **changes)
