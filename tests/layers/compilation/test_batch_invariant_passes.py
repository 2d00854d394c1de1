"""The kernels that batch-invariant decoding passes of published models request, found without a GPU."""

import pytest
import torch

from dsa.runtime.asked_variants import asked_variants
from dsa_layers import Precision, Ranks
from dsa_layers.batch.decode_batch import DecodeInputs
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.compilation import META, without_memory
from dsa_layers.engine.fp32_product import batch_invariant
from dsa_layers.engine.split import split
from tests.layers.layers.calls import Operators, record
from tests.layers.models.configs import published

PUBLISHED = ("deepseek_v32", "glm_5_2", "deepseek_v4_flash")
# PyTorch's products. A batch-invariant pass must not use them: their order of sums may depend on the number of rows.
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "_grouped_mm", "_scaled_mm", "addmv", "mv", "dot"}
# Our kernels that only passes with certain numbers of rows use. A batch-invariant pass must not use them.
OF_FEW_ROWS = {"compile_route_to_experts", "compile_route_by_table", "compile_sparse_mla_combine"}


def asked(config, kv_cache, count, tokens, drafts, *, invariant, ranks=1):
    """Decode `count` sequences of up to `tokens` tokens on the meta device, with rank 0's part of the model. Return the
    sets of requested kernels' functions, of attention's (function, arguments), and of called PRODUCTS."""
    model, cache = without_memory(config, Precision.of(config, kv_cache=kv_cache))
    if ranks > 1:
        split(model, Ranks(0, ranks), blocks=True)
    inputs = DecodeInputs(count, -(-tokens // cache.page_size), cache.page_size, META, 1 + drafts)
    with asked_variants("sm_90") as found, pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        called = record(patch, "mm", owner=torch)
        for said in ("sum", "join_columns"):
            patch.setattr(Ranks, said, lambda self, x: x)
        operators = Operators(lambda func, _: called.append(func.name().removeprefix("aten::").partition(".")[0]))
        with operators, batch_invariant("decoding" if invariant else None):
            model.logits(model.states(inputs.tokens, inputs.batch(), cache))
    functions = {variant.function for variant in found}
    of_attention = "compile_sparse_mla", "compile_mla"
    attention = {(v.function, v.arguments) for v in found if v.function.startswith(of_attention)}
    return functions, attention, PRODUCTS & {*called}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(("ranks", "kv_cache"), [(2, "fp8"), (1, "fp8"), (1, "model"), (8, "fp8")])
def test_passes_of_any_size_take_one_way(name, ranks, kv_cache):
    config = published(name)
    functions, attention, products = asked(config, kv_cache, 1, 64, 0, invariant=True, ranks=ranks)
    assert not products and not functions & OF_FEW_ROWS and attention
    for count, tokens, drafts in ((1, 8192, DRAFTS), (16, 64, 0), (17, 8192, 1), (65, 8192, 0), (200, 64, DRAFTS)):
        found, own, products = asked(config, kv_cache, count, tokens, drafts, invariant=True, ranks=ranks)
        assert not products and not found & OF_FEW_ROWS
        assert own == attention


@pytest.mark.parametrize("name", PUBLISHED)
def test_other_passes_do_not(name):
    """Passes that are not batch-invariant break the rules of the test above, so that test can fail."""
    few, attention, _ = asked(published(name), "fp8", 1, 8192, 0, invariant=False)
    many, own, products = asked(published(name), "fp8", 200, 8192, 0, invariant=False)
    assert few & OF_FEW_ROWS and products and (few ^ many) and own != attention
