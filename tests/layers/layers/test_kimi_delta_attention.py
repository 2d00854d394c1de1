"""Kimi delta attention: the recurrence, the convolution, gradients, and passes over a cache."""

import sys

import pytest
import torch

from dsa_layers import DecodeBatch, SequenceBatch, fuse
from dsa_layers.cache.delta_kv_cache import DeltaCache
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.engine import delta_kernels
from dsa_layers.layers.delta_rule import CHUNK, delta_rule
from dsa_layers.layers.kimi_delta_attention import KimiDeltaAttention

HIDDEN, HEADS, DIM, WIDTH = 32, 3, 8, 4
LENS = [2 * CHUNK + 5, 1, CHUNK, 7]


def token_by_token(q, k, v, decay, beta, state):
    """The recurrence as in the docstring of `delta_rule`, for one sequence."""
    out = []
    for q_t, k_t, v_t, decay_t, beta_t in zip(q, k, v, decay, beta):
        state = decay_t.exp()[..., None] * state
        missing = v_t - torch.einsum("hd,hdv->hv", k_t, state)
        state = state + beta_t[:, None, None] * k_t[..., None] * missing[:, None]
        out.append(torch.einsum("hd,hdv->hv", q_t, state))
    return torch.stack(out), state


def drawn(tokens, sequences):
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, HEADS, DIM), dim=-1) for _ in range(2))
    v, decay = torch.randn(tokens, HEADS, DIM + 2), -5 * torch.rand(tokens, HEADS, DIM)
    return (q, k, v, decay, torch.rand(tokens, HEADS)), torch.randn(sequences, HEADS, DIM, DIM + 2)


@pytest.mark.parametrize("lens", [LENS, [CHUNK + 3] * 3, [1, 1], []], ids=str)
@pytest.mark.parametrize("continued", [False, True])
def test_the_recurrence_is_that_of_single_tokens(lens, continued):
    inputs, states = drawn(sum(lens), len(lens))
    states = states if continued else torch.zeros_like(states)
    out, last = delta_rule(*inputs, lens, states if continued else None)
    assert out.shape == inputs[2].shape and last.shape[:1] == (len(lens),)
    parts = zip(*(x.split(lens) for x in inputs))
    for (own, own_last), *got in zip((token_by_token(*x, s) for x, s in zip(parts, states)), out.split(lens), last):
        assert torch.allclose(got[0], own, atol=1e-5) and torch.allclose(got[1], own_last, atol=1e-5)


def layer(**options):
    torch.manual_seed(0)
    made = KimiDeltaAttention(HIDDEN, HEADS, dim=DIM, conv_width=WIDTH, **options)
    torch.nn.init.normal_(made.A_log)
    torch.nn.init.normal_(made.dt_bias)
    return made


def run(module, x, batch, cache=None):
    return module(x, None, None, batch, cache)[0]


def cache_of(drafts=0, slots=3):
    """Return a cache that is full of NaNs."""
    inputs = torch.full((slots, WIDTH + DRAFTS, 1, 3 * HEADS * DIM), torch.nan)
    return DeltaCache(inputs, torch.full((slots, drafts + 2, HEADS, DIM, DIM), torch.nan))


def paged(new, total, slots):
    pages = [[i] for i in range(len(new))]
    return SequenceBatch.paged(new, total, pages, 128, state_slots=slots)


def test_passes_over_a_cache_continue_the_sequences():
    module, x = layer(), torch.randn(2, 90, HIDDEN)
    with torch.no_grad():
        expected = run(module, x.flatten(0, 1), SequenceBatch.without_cache([90, 90])).unflatten(0, (2, 90))
        module, cache, done = fuse(module), cache_of(), [0, 0]
        for new in ([40, 1], [1, 2], [1, 1], [1, 1], [47, 85]):
            parts = [slice(n, n + more) for n, more in zip(done, new)]
            done = [part.stop for part in parts]
            got = run(module, torch.cat([x[i, part] for i, part in enumerate(parts)]), paged(new, done, [2, 0]), cache)
            assert torch.allclose(got, torch.cat([expected[i, part] for i, part in enumerate(parts)]), atol=1e-5)
    assert done == [90, 90]


@torch.no_grad()
def test_a_sequence_continues_after_any_token_of_a_decoding_pass():
    """A pass of one token and two drafts is repeated, as before the capture of a CUDA graph. Then the sequence
    continues after 1, 2 or 3 of its tokens."""
    module, x = fuse(layer()), torch.randn(20, HIDDEN)
    expected = run(module, x, SequenceBatch.without_cache([20]))
    for accepted in (1, 2, 3):
        cache = cache_of(drafts=2)
        run(module, x[:9], paged([9], [9], [1]), cache)
        for total in (12, 12, 9 + accepted + 3):
            table, lens, slots = (torch.tensor(n, dtype=torch.int32) for n in ([[0]], [total], [1]))
            got = run(module, x[total - 3 : total], DecodeBatch(table, 128, lens, total, slots, next_n=3), cache)
            assert torch.allclose(got, expected[total - 3 : total], atol=1e-5)


def test_every_parameter_has_a_gradient():
    module = layer()
    run(module, torch.randn(9, HIDDEN), SequenceBatch.without_cache([6, 3])).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())


def test_a_pass_of_more_tokens_than_there_are_states_is_refused():
    table, lens, slots = (torch.tensor(x, dtype=torch.int32) for x in ([[0]], [9], [0]))
    batch = DecodeBatch(table, 128, lens, 9, slots, next_n=2)
    with pytest.raises(ValueError, match=r"^batch: next_n must be at most 1 with this cache, got 2$"):
        run(fuse(layer()), torch.randn(2, HIDDEN), batch, cache_of())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"conv_width": 0}, "^conv_width: must be at least 1, got 0"),
        ({"n_heads": 2.0}, "^n_heads: must be an int"),
        ({"lower_bound": 0.0}, "^lower_bound: must be below 0, got 0.0"),
    ],
)
def test_wrong_sizes_are_refused(options, told):
    with pytest.raises((TypeError, ValueError), match=told):
        KimiDeltaAttention(**{"hidden": HIDDEN, "n_heads": HEADS} | options)


def test_one_warning_says_that_there_are_no_kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    delta_kernels.installed.cache_clear()
    with pytest.warns(UserWarning, match="runs in PyTorch, which is slow on a GPU: .*install the package fla-core"):
        assert not delta_kernels.installed()
    assert not delta_kernels.installed()
    delta_kernels.installed.cache_clear()
