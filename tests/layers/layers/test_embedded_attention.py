"""The example of docs/how-to/embed-attention.md: one layer over the pages of an inference engine."""

import re
from pathlib import Path

import pytest
import torch

TEXT = (Path(__file__).parents[3] / "docs" / "how-to" / "embed-attention.md").read_text()
(EXAMPLE,) = [block for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M) if "def decode(" in block]


@pytest.fixture
def engine():
    """Run the example and return {name: value} for its functions and variables."""
    torch.manual_seed(0)
    names = {}
    exec(EXAMPLE, names)
    return names


@torch.no_grad()
def test_a_decoding_step_equals_the_end_of_a_prefill(engine):
    token, pages = engine["token"].cpu(), engine["block_table"]
    decoded = engine["decode"](engine["token"], torch.tensor([301, 41], dtype=torch.int32), pages)
    for row, (total, expected) in enumerate(zip((301, 41), decoded)):
        prefilled = engine["prefill"](token[row : row + 1].repeat(2, 1), (2,), (total + 1,), pages[row : row + 1])
        torch.testing.assert_close(prefilled[0], expected, rtol=0.02, atol=0.02)


@torch.no_grad()
def test_a_padding_row_writes_nothing_and_gets_zeros(engine):
    both = torch.tensor([301, 41], dtype=torch.int32)
    expected = engine["decode"](engine["token"], both, engine["block_table"])[0].clone()
    table = engine["block_table"].clone()
    table[1] = -1
    before = engine["latent"].clone(), engine["index"].clone()
    out = engine["decode"](engine["token"], torch.tensor([301, 0], dtype=torch.int32), table)
    assert torch.equal(out[0], expected) and not out[1].any()
    assert torch.equal(engine["latent"], before[0]) and torch.equal(engine["index"], before[1])
