"""DeepSeek-V3.2 against transformers' own."""

import torch

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.checkpoint.loading import load_model
from tests.layers.families import hf_models
from tests.layers.families.parity import ParityTests, assert_same


class TestDeepseekV32(ParityTests):
    @staticmethod
    def build(directory):
        return hf_models.deepseek_v32(directory)


@torch.no_grad()
def test_without_groups_and_yarn(tmp_path):
    """Another config: one routing group, plain rope, two shared experts, all layers sparse."""
    changes = {
        "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 0, "num_hidden_layers": 2,
        "routed_scaling_factor": 1.7, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }  # fmt: skip
    theirs = hf_models.deepseek_v32(tmp_path, **changes)
    ours = load_model(tmp_path, dtype=torch.float32, progress=False)
    tokens = torch.randint(0, 256, (40,))
    got = ours(tokens, SequenceBatch.without_cache([40]), all_tokens=True)
    assert_same(got, theirs(tokens[None]).logits[0])
