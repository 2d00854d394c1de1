"""The bridge of the expansion with projection: the ops that it joins, and which kernels it launches."""

import pytest
import torch

import dsa
from dsa import reference
from dsa.ops.elementwise import hyper_expand_mix


def arguments(tokens=3, n=4, d=64, count=24):
    return {
        "y": torch.randn(tokens, d).bfloat16(), "streams": torch.randn(tokens, n, d).bfloat16(),
        "post": torch.randn(tokens, n), "comb": torch.randn(tokens, n, n),
        "parts": torch.randn(3, count, n * d).bfloat16(),
    }  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_is_the_ops_one_after_the_other(tokens):
    given = arguments(tokens)
    new, mix = dsa.hyper_expand_mix(**given)
    theirs = reference.hyper_expand_mix(**given)
    *rest, parts = given.values()
    expected = dsa.hyper_expand(*rest)
    assert torch.equal(new, expected) and torch.equal(mix, dsa.hyper_mix(expected, parts))
    assert torch.equal(new, theirs[0]) and torch.equal(mix, theirs[1])


@pytest.mark.parametrize(
    ("tokens", "kernel"), [(5, "hyper_mix_few_tokens"), (64, "hyper_mix_few_tokens"), (300, "hyper_mix")]
)
def test_more_tokens(named_launches, tokens, kernel):
    """The two ops' kernels: the second reads what the first writes."""
    new, mix = dsa.hyper_expand_mix(**arguments(tokens))
    (expand, _, expanded), (name, _, mixed) = named_launches
    assert (expand, name) == ("hyper_expand", kernel) and expanded[-1] is new and mixed[-1] is mix
    assert mixed[0].data_ptr() == new.data_ptr()


def test_more_outputs_than_a_grid_has(named_launches, monkeypatch):
    """Of few tokens, too, the two ops' kernels."""
    monkeypatch.setattr(hyper_expand_mix, "MAX_EXPAND_MIX_OUTPUTS", 23)
    dsa.hyper_expand_mix(**arguments(3))
    assert [name for name, *_ in named_launches] == ["hyper_expand", "hyper_mix_few_tokens"]
