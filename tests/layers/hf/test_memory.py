"""No pass makes a tensor of queries x keys: neither a mask nor the scores of all queries at once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.layers.hf.pairs import pair

LENGTH = 600  # tokens; more than any dimension of a weight, so only queries x keys have two dimensions >= LENGTH
SMALL = {"max_position_embeddings": 1024, "index_n_heads": 8}  # the default 32 index heads of 32 channels exceed LENGTH


class Squares(TorchDispatchMode):
    """Counts the tensors with two dimensions of at least LENGTH among the results of ops."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            self.found += isinstance(x, torch.Tensor) and sum(n >= LENGTH for n in x.shape) > 1
        return result


def squares(model, gradients, **options):
    tokens = torch.randint(0, 255, (1, LENGTH))
    with Squares() as mode, torch.set_grad_enabled(gradients):
        logits = model(tokens, **options).logits
        if gradients:
            logits.sum().backward()
    return mode.found


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa, shared indexers", "deepseek_v4"])
def models(request, tmp_path_factory):
    models = pair(request.param, tmp_path_factory.mktemp("model"), **SMALL)
    for module in models.ours.modules():
        if hasattr(module, "workspace"):
            module.workspace = 4 * LENGTH * 20  # bytes of fp32 scores of 20 queries and LENGTH keys
    return models


@pytest.mark.parametrize("gradients", [False, True])
def test_no_tensor_has_a_row_and_a_column_for_each_token(models, gradients):
    assert squares(models.ours, gradients) == 0
    assert squares(models.ours, gradients, attention_mask=torch.ones(1, LENGTH)) == 0
    assert gradients or squares(models.theirs, gradients) > 0  # `Squares` finds the tensors that transformers makes
