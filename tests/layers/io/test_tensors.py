"""Checkpoints with the names of transformers' modules, where two tensors hold all experts of a layer."""

import re

import pytest
import torch

from dsa_layers import SequenceBatch, load_model
from dsa_layers.errors import CheckpointError
from dsa_layers.io.tensors import split_experts
from tests.layers.io.stand_ins import assert_same_tensors
from tests.layers.models import hf_models
from tests.layers.models.parity import assert_same


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("down_proj", (2, 5), "experts in one tensor are [experts, hidden, inner]"),
        ("down_proj", (10**9, 1, 1), "that is 1000000000 experts; the model has 256"),
        ("gate_up_proj", (2, 7, 5), "[2, 7, 5]; experts in one tensor are [experts, 2 * inner"),
    ],
)
def test_experts_in_a_tensor_of_another_shape_are_refused(name, shape, problem):
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        split_experts(f"a.experts.{name}", shape, experts=256)


@torch.no_grad()
def test_both_spellings_of_transformers_give_the_same_model(tmp_path):
    theirs = hf_models.deepseek_v4(tmp_path / "modules", original_format=False)
    ours = load_model(tmp_path / "modules", dtype=torch.float32, progress=False)
    tokens = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1))
    assert_same(ours(tokens, SequenceBatch.without_cache([70]), all_tokens=True), theirs(tokens[None]).logits[0])
    theirs.save_pretrained(tmp_path / "mixed")
    mixed = load_model(tmp_path / "mixed", dtype=torch.float32, progress=False)
    assert_same_tensors(mixed.state_dict(), ours.state_dict())
