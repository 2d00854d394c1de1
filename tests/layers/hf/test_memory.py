"""No pass makes a tensor of queries x keys: neither a mask nor the scores of all queries at once."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.layers.hf.pairs import pair
from tests.layers.layers.calls import Operators

LENGTH = 600  # tokens; more than any dimension of a weight, so only queries x keys have two dimensions >= LENGTH
SMALL = {"max_position_embeddings": 1024, "index_n_heads": 8}  # the default 32 index heads of 32 channels exceed LENGTH


def squares(model, gradients, **options):
    """Count the results of operators that have two dimensions of at least LENGTH."""
    tokens, shapes = torch.randint(0, 255, (1, LENGTH)), []

    def seen(operator, result):
        shapes.extend(x.shape for x in tree_leaves(result) if isinstance(x, torch.Tensor))

    with Operators(seen), torch.set_grad_enabled(gradients):
        logits = model(tokens, **options).logits
        if gradients:
            logits.sum().backward()
    return sum(sum(n >= LENGTH for n in shape) > 1 for shape in shapes)


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
    assert gradients or squares(models.theirs, gradients) > 0  # `squares` finds the tensors that transformers makes
