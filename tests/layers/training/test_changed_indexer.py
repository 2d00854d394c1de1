"""Indexers other than the lightning indexer: generation, the loss `kl` of any scores, and losses that fail."""

import pytest
import torch
from torch import nn

import dsa
from dsa_layers import Generator, IndexerStage, LightningIndexer, SamplingParams, SequenceBatch, fused, load_model
from dsa_layers.layers.rope import RotaryEmbedding, rope_frequencies
from dsa_layers.layers.trained_attention import SparseAttention, WarmupAttention
from tests.reference.common import assert_refused

TOP_K = 6
ROTARY = RotaryEmbedding(rope_frequencies(16, 1e4))


class DotProductIndexer(nn.Module):
    """An indexer with the scores I[t, s] = (W_q qr[t]) . (W_k x[s]): one head, without ReLU, rope or head weights."""

    def __init__(self, hidden, q_lora_rank, top_k, head_dim=128):
        super().__init__()
        self.top_k = top_k
        self.q = nn.Linear(q_lora_rank, head_dim, bias=False)
        self.k = nn.Linear(hidden, head_dim, bias=False)

    @torch.no_grad()
    def select(self, x, qr, rope, batch, cache=None):
        keys = self.k(x) if cache is None else dsa.read_kv_cache(cache.index, batch.key_slots)
        scores = self.q(qr) @ keys.T
        return dsa.topk_indices(scores, self.top_k, starts=batch.key_starts, lengths=batch.visible_keys)

    @torch.no_grad()
    def store(self, x, rope, batch, cache):
        dsa.write_kv_cache(self.k(x), cache.index, batch.slots)

    def loss(self, x, qr, rope, attention):
        return attention.kl(self.q(qr) @ attention.gather(self.k(x)).T)


@pytest.fixture
def model(checkpoint):
    """The tiny DeepSeek-V3.2 in fp32, with a DotProductIndexer in every layer."""
    torch.manual_seed(0)
    model = load_model(checkpoint, dtype=torch.float32, dequantize=True, trainable=True, progress=False)
    for layer in model.model.layers:
        layer.self_attn.indexer = DotProductIndexer(model.config.hidden_size, model.config.q_lora_rank, TOP_K)
    return model


def test_it_selects_with_a_cache(model):
    model.eval()
    torch.manual_seed(2)
    prompts = [torch.randint(model.config.vocab_size, (n,)).tolist() for n in (21, 3)]
    generator = Generator(model, cache_tokens=256, page_size=8, prefill_chunk=10)
    generator.eos = set()
    with fused(model):
        completions = generator.generate(prompts, SamplingParams(max_tokens=6))
    for prompt, completion in zip(prompts, completions):
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(6):
                tokens.append(model(torch.tensor(tokens), SequenceBatch.without_cache([len(tokens)])).argmax().item())
        assert completion.tokens == tokens[len(prompt) :]


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_any_scores_and_lightning_scores_have_one_loss(stage):
    torch.manual_seed(3)
    batch = SequenceBatch.without_cache([13, 8, 1])
    tokens, heads = 22, 3
    cos, sin = ROTARY(batch.positions)
    indexer = LightningIndexer(32, 24, n_heads=4, head_dim=32, top_k=TOP_K, quantize=False)
    x, qr = torch.randn(tokens, 32), torch.randn(tokens, 24)
    q, k, v = (torch.randn(tokens, heads, d, requires_grad=True) for d in (20, 20, 12))
    absorbed, kv = torch.randn(tokens, heads, 24, requires_grad=True), torch.randn(tokens, 24, requires_grad=True)

    def make():
        if stage == "warmup":
            return WarmupAttention(q, k, v, 0.3, batch)
        return SparseAttention(absorbed, kv, 0.3, 16, TOP_K, batch)

    index_q, index_k, weights = indexer.project(x, qr, (cos, sin))
    scores = torch.einsum("th,ths->ts", weights, torch.einsum("thd,sd->ths", index_q, index_k).relu())
    of_ops, of_scores = make(), make()
    expected, got = of_ops.lightning_kl(index_q, index_k, weights), of_scores.kl(scores)
    assert got.shape == (tokens,) and torch.allclose(got, expected, atol=1e-5)
    assert torch.allclose(of_scores.out, of_ops.out, atol=1e-5)
    learned, inputs = list(indexer.parameters()), (q, k, v) if stage == "warmup" else (absorbed, kv)
    for a, b in zip(*(torch.autograd.grad(kl.sum(), learned, retain_graph=True) for kl in (got, expected))):
        assert torch.allclose(a, b, atol=1e-5)
    for kl in (got, expected):
        of_inputs = torch.autograd.grad(kl.sum(), inputs, allow_unused=True, retain_graph=True)
        assert all(g is None or not g.any() for g in of_inputs)


def test_scores_of_another_shape():
    batch = SequenceBatch.without_cache([3, 2])
    attention = SparseAttention(torch.randn(5, 1, 8), torch.randn(5, 8), 1.0, 4, 2, batch)
    message = r"scores: must be \[5, 5\], of each token and key, got \[5, 3\]"
    assert_refused(message, attention.kl, torch.randn(5, 3))


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_a_loss_that_computes_no_attention(model, stage, monkeypatch):
    monkeypatch.setattr(DotProductIndexer, "loss", lambda self, x, qr, rope, attention: self.k(x).sum(-1))
    with pytest.raises(RuntimeError, match=r"indexer\.loss: must call attention\.kl or attention\.lightning_kl"):
        with IndexerStage(model, stage):
            model(torch.arange(20), SequenceBatch.without_cache([20]))
