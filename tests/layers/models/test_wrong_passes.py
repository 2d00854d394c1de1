"""Models and drafters refuse wrong inputs. The message names the argument, what it got, and what is accepted."""

import re

import pytest
import torch

from dsa_layers import DecodeBatch, SequenceBatch, load_model

BATCH = SequenceBatch.without_cache([3, 2])
TOKENS = torch.tensor([5, 6, 7, 8, 9])
STEP = DecodeBatch(torch.zeros(2, 1, dtype=torch.int32), 64, torch.ones(2, dtype=torch.int32), 64)
WRONG = [
    ((TOKENS[:4], BATCH), "tokens: shape must be [5], got [4] (sizes as of batch)"),
    ((TOKENS[:1], STEP), "tokens: shape must be [2], got [1] (sizes as of batch)"),
    ((TOKENS.float(), BATCH), "tokens: dtype must be int64, got float32"),
    (([5, 6, 7, 8, 9], BATCH), "tokens: must be a torch.Tensor, got list"),
    ((TOKENS, [3, 2]), "batch: must be a SequenceBatch or a DecodeBatch, got list"),
    ((TOKENS, BATCH, 5), "cache: must be one of the model's make_cache, or None, got int"),
]


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa", "deepseek_v4"])
def model(request, tiny_checkpoint):
    return load_model(tiny_checkpoint(request.param), drafter=True, progress=False)


@torch.inference_mode()
@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_inputs_of_a_pass_are_refused(model, arguments, message):
    tokens, *rest = arguments
    for run in (model, model.states, lambda *given: model.drafter(given[0], torch.zeros(5, 8), *given[1:])):
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
            run(tokens, *rest)
