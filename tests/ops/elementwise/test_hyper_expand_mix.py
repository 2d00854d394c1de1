"""Which kernels `hyper_expand_mix` launches."""

import pytest

from dsa.cases import cases_of
from dsa.ops.elementwise import hyper_expand_mix

(CASE,) = cases_of("hyper_expand_mix")


@pytest.mark.parametrize(
    ("tokens", "kernel"), [(5, "hyper_mix_few_tokens"), (64, "hyper_mix_few_tokens"), (300, "hyper_mix")]
)
def test_more_tokens(named_launches, tokens, kernel):
    """More than 4 tokens need two kernels. The second reads the new streams that the first writes."""
    new, mix = CASE.run(CASE.arguments(tokens=tokens, channels=64))
    (expand, _, expanded), (name, _, mixed) = named_launches
    assert (expand, name) == ("hyper_expand", kernel) and expanded[-1] is new and mixed[-1] is mix
    assert mixed[0].data_ptr() == new.data_ptr()


def test_more_outputs_than_a_grid_has(named_launches, monkeypatch):
    """The fused kernel does not accept so many outputs (rows of the projection's matrix)."""
    monkeypatch.setattr(hyper_expand_mix, "MAX_EXPAND_MIX_OUTPUTS", 23)
    CASE.run(CASE.arguments())
    assert [name for name, *_ in named_launches] == ["hyper_expand", "hyper_mix_few_tokens"]
