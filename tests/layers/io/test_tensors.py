"""Checkpoints whose experts are in one tensor a layer, under the names of transformers' modules."""

import re

import pytest
import torch

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.errors import CheckpointError
from dsa_layers.io.loading import load_model
from dsa_layers.io.tensors import split_experts
from tests.layers.models import hf_models

TOLERANCE = 2e-5


def test_experts_in_one_tensor_are_split():
    assert split_experts("a.experts.gate_up_proj", (2, 8, 5)) == {
        "a.experts.0.gate_proj.weight": (0, slice(0, 4)),
        "a.experts.0.up_proj.weight": (0, slice(4, 8)),
        "a.experts.1.gate_proj.weight": (1, slice(0, 4)),
        "a.experts.1.up_proj.weight": (1, slice(4, 8)),
    }
    assert split_experts("a.experts.down_proj", (2, 5, 4)) == {
        "a.experts.0.down_proj.weight": (0,),
        "a.experts.1.down_proj.weight": (1,),
    }
    scale = split_experts("a.experts.gate_up_proj_scale_inv", (1, 4, 1))
    assert scale["a.experts.0.up_proj.weight_scale_inv"] == (0, slice(2, 4))
    block_scale = split_experts("a.experts.down_proj_block_scale", (2, 1, 1))
    assert block_scale["a.experts.1.down_proj.weight_block_scale"] == (1,)
    for other in ("a.shared_experts.down_proj.weight", "a.experts.0.down_proj.weight", "a.gate_up_proj"):
        assert split_experts(other, (4, 4)) == {other: ()}


def test_experts_in_a_tensor_of_another_shape_are_refused():
    for shape, problem in [
        ((2, 5), "experts in one tensor are [experts, hidden, inner]"),
        ((10**9, 1, 1), "that is 1000000000 experts; the model has 256"),
    ]:
        with pytest.raises(CheckpointError, match=re.escape(problem)):
            split_experts("a.experts.down_proj", shape, experts=256)
    with pytest.raises(CheckpointError, match=r"\[2, 7, 5\]; experts in one tensor are \[experts, 2 \* inner"):
        split_experts("a.experts.gate_up_proj", (2, 7, 5))


@torch.no_grad()
def test_both_spellings_of_transformers_give_the_same_model(tmp_path):
    theirs = hf_models.deepseek_v4(tmp_path / "modules", original_format=False)
    ours = load_model(tmp_path / "modules", dtype=torch.float32, progress=False)
    tokens = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens[None]).logits[0]
    got = ours(tokens, SequenceBatch.without_cache([70]), all_tokens=True)
    assert (got - expected).abs().max() < TOLERANCE and expected.std() > 0.3
    theirs.save_pretrained(tmp_path / "mixed")
    mixed = load_model(tmp_path / "mixed", dtype=torch.float32, progress=False).state_dict()
    assert mixed.keys() == ours.state_dict().keys()
    assert all(torch.equal(tensor, mixed[name]) for name, tensor in ours.state_dict().items())
