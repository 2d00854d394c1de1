"""Checkpoints whose experts are in one tensor a layer, under the names of transformers' modules."""

import re

import pytest
import torch

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.errors import CheckpointError
from dsa_layers.io.loading import load_model
from dsa_layers.io.tensors import dequantize_fp4, quantize_fp4, split_experts
from tests.layers.io.stand_ins import assert_same_tensors
from tests.layers.models import hf_models
from tests.layers.models.parity import assert_same
from tests.reference.gemm.fp4 import VALUES, e8m0, pack, random_codes, weight


def test_the_low_nibble_is_the_first_value():
    packed = torch.tensor([[0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F, *[0] * 8]], dtype=torch.uint8)
    got = dequantize_fp4(packed, e8m0(torch.tensor([[1]])))
    order = [*range(1, 16), 0]
    assert got[0, :16].tolist() == [2 * VALUES[code] for code in order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantised_values_are_exact(dtype):
    codes = random_codes(130, 96)
    exponents = torch.randint(-125, 124, (130, 3), generator=torch.Generator().manual_seed(1))
    got = dequantize_fp4(pack(codes), e8m0(exponents), dtype)
    assert got.dtype == dtype and torch.equal(got.double(), weight(codes, exponents))


def test_quantised_values_are_the_nearest_under_the_least_scale_that_reaches_the_largest_magnitude():
    w = torch.randn(130, 96, generator=torch.Generator().manual_seed(4))
    w = w * torch.exp2(torch.randint(-40, 40, (130, 1), generator=torch.Generator().manual_seed(5)))
    packed, scale = quantize_fp4(w)
    assert (packed.dtype, packed.shape) == (torch.int8, (130, 48))
    assert (scale.dtype, scale.shape) == (torch.float8_e8m0fnu, (130, 3))
    largest, power = w.unflatten(1, (-1, 32)).abs().amax(-1), scale.float()
    assert (largest <= 6 * power).all() and (largest > 3 * power).all()
    reachable = torch.tensor(VALUES) * power.repeat_interleave(32, 1)[..., None]
    least = (reachable - w[..., None]).abs().amin(-1)
    assert torch.equal((dequantize_fp4(packed, scale) - w).abs(), least)


def test_halfway_between_two_values_the_smaller_one_is_taken_and_a_group_of_zeros_has_scale_1():
    w = torch.zeros(1, 64)
    w[0, :8] = torch.tensor([0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5, 6])
    packed, scale = quantize_fp4(w)
    assert dequantize_fp4(packed, scale)[0, :8].tolist() == [0, 0.5, -1, 1.5, 2, -3, 4, 6]
    assert scale.float().tolist() == [[1, 1]] and dequantize_fp4(packed, scale)[0, 8:].eq(0).all()


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
