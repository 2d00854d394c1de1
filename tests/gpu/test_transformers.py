"""Models of transformers that run dsa's kernels (`dsa_layers.hf`), compared with transformers' own eager attention on
the same GPU."""

import copy
import gc

import pytest
import torch
from transformers import DynamicCache

import dsa
from dsa.runtime.op import forget_calls
from dsa.testing import calc_diff
from dsa_layers.hf import accelerate
from tests.gpu.launched_ops import launched_ops
from tests.gpu.transformers_models import MODELS, make

pytestmark = pytest.mark.filterwarnings("ignore:.*has no Hopper kernel yet")
LENGTH = 330
# Our bf16 logits may have FACTOR times the calc_diff of transformers' own bf16 logits, plus SLACK. In bf16, both models
# sometimes select other keys than in fp32.
FACTOR, SLACK = 2.0, 1e-4
# Bound of calc_diff with FP8 index scores. With random weights these often select other keys than fp32 scores.
FP8 = 0.1
PREFILL = {
    "deepseek_v32": {"fp8_mqa_logits", "topk_indices", "write_mla_cache", "write_indexer_keys"},
    "glm_moe_dsa": {"fp8_mqa_logits", "topk_indices", "write_mla_cache", "write_indexer_keys"},
    "deepseek_v4": {"fp8_mqa_logits", "topk_indices", "window_sparse_attention", "write_compressed_kv"},
}
DECODE = {"fp8_paged_mqa_logits", "topk_indices", "flash_mla_with_kvcache", "rms_norm"}


@pytest.fixture(scope="module", params=MODELS)
def family(request):
    yield request.param
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def exact(family):
    return make(family, "cuda")


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(2048, (2, LENGTH), generator=torch.Generator().manual_seed(1)).cuda()


def in_bf16(model):
    """Return a copy in bf16, in which some modules stay in fp32 as in transformers. But all norms become bf16, because
    the eager layers of transformers 5.17 do not accept the fp32 result of a norm."""
    rounded = copy.deepcopy(model)
    strict = [kept for kept in model._keep_in_fp32_modules_strict or () if "norm" not in kept] + [
        "indexer.weights_proj"
    ]
    for name, parameter in rounded.named_parameters():
        if not any(f".{kept}." in f".{name}." for kept in strict):
            parameter.data = parameter.data.bfloat16()
    return rounded


@pytest.fixture
def launched(monkeypatch):
    return launched_ops(monkeypatch)


def in_chunks(model, tokens, chunks):
    cache = DynamicCache(config=model.config)
    return torch.cat([model(part, cache=cache).logits for part in tokens.split(chunks, 1)], 1)


def padded(tokens, lens):
    ids, mask = torch.zeros_like(tokens[:, : max(lens)]), torch.zeros_like(tokens[:, : max(lens)])
    for b, n in enumerate(lens):
        ids[b, max(lens) - n :], mask[b, max(lens) - n :] = tokens[b, :n], 1
    return ids, mask


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[LENGTH], [200, 90, *[1] * 40]], ids=["prefill", "prefill and decode"])
def test_bf16_is_within_rounding(exact, tokens, chunks, record_error):
    expected, rounded = exact(tokens).logits, in_bf16(exact)
    theirs = calc_diff(rounded(tokens).logits, expected)
    ours = calc_diff(in_chunks(accelerate(rounded), tokens, chunks), expected)
    print(f"calc_diff from fp32: eager in bf16 {theirs:.2e}, ours {ours:.2e}")
    record_error(ours)
    assert ours < FACTOR * theirs + SLACK


@torch.no_grad()
def test_fp8_index_scores(family, exact, tokens, launched):
    expected, rounded = exact(tokens).logits, in_bf16(exact)
    theirs = calc_diff(rounded(tokens).logits, expected)
    ours = accelerate(rounded, fp8_indexer=True)
    with dsa.use_backend("reference"):
        references = in_chunks(ours, tokens, [LENGTH])
    assert not launched
    prefill = in_chunks(ours, tokens, [LENGTH])
    of_prefill = set(launched)
    launched.clear()
    forget_calls()
    decode = in_chunks(ours, tokens, [200, 90, *[1] * 40])
    from_references = [calc_diff(logits, references) for logits in (prefill, decode)]
    from_exact = [calc_diff(logits, expected) for logits in (prefill, decode)]
    print(f"{family}: calc_diff of prefill and decoding from the references {from_references}, from fp32 {from_exact}")
    assert max(from_references) < FACTOR * theirs + SLACK and max(from_exact) < FP8
    assert of_prefill >= PREFILL[family] and launched >= DECODE


def test_generate_with_padding_in_bf16(family, exact, tokens, launched):
    """Where the tokens of a sequence in a batch first differ from those of the sequence alone, their logits must nearly
    tie."""
    ours = accelerate(in_bf16(exact), fp8_indexer=True)
    ids, mask = padded(tokens[:, :200], [200, 37])
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    got = ours.generate(ids, attention_mask=mask, **options)
    for b, n in enumerate([200, 37]):
        alone = tokens[b : b + 1, :n]
        expected = ours.generate(alone, attention_mask=torch.ones_like(alone), **options)
        for i, (own, logits) in enumerate(zip(got.sequences[b, 200:].tolist(), expected.logits)):
            other = expected.sequences[0, n + i].item()
            if own != other:
                assert logits[0, other] - logits[0, own] < 0.25 * logits.std()
                break
    assert "flash_mla_with_kvcache" in launched


@pytest.mark.parametrize("fp8_indexer", [False, True])
def test_gradients(exact, tokens, launched, fp8_indexer):
    def gradients(model):
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: found[name].float() for name in found if ".self_attn." in name}

    expected = gradients(copy.deepcopy(exact).train())
    theirs = gradients(in_bf16(exact).train())
    ours = gradients(accelerate(in_bf16(exact).train(), fp8_indexer=fp8_indexer))
    assert ours.keys() == expected.keys()
    diffs = {name: (calc_diff(ours[name], g), calc_diff(theirs[name], g)) for name, g in expected.items()}
    worst = max(diffs, key=lambda name: diffs[name][0] - diffs[name][1])
    print(f"worst: {worst}, calc_diff from fp32: ours {diffs[worst][0]:.2e}, eager in bf16 {diffs[worst][1]:.2e}")
    for name, (own, other) in diffs.items():
        assert own < (FP8 if fp8_indexer else 0) + 3 * other + 1e-3, name
    assert "sparse_mla_attention" in launched
