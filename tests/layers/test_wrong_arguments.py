"""Functions that users call refuse wrong arguments. The message names the argument and its value or type."""

import re
from functools import partial

import pytest

from dsa_layers import SHIPPED_MODEL, IndexerStage, Ranks, Tokenizer, load_model, write_tiny_checkpoint
from dsa_layers.hf import accelerate
from dsa_layers.layers import rope
from dsa_layers.layers.rope import rope_frequencies
from dsa_layers.models.registry import FAMILIES


def refused(message, call, *arguments, **options):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        call(*arguments, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": "x"}, "seed: must be an integer, got 'x'"),
        ({"seed": -1}, "seed: must be at least 0, got -1"),
        ({"seed": 2**63}, f"seed: must be at most {2**63 - 1}, got {2**63}"),
        ({"quantized": 1}, "quantized: must be True or False, got 1"),
        ({"model": "llama"}, f"model: must be one of {', '.join(map(repr, FAMILIES))}, got 'llama'"),
    ],
)
def test_nothing_is_written_for_wrong_options(tmp_path, options, message):
    refused(message, write_tiny_checkpoint, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


TOKENIZER = Tokenizer(SHIPPED_MODEL)
yarn_frequencies = partial(rope.yarn_frequencies, factor=4, original_length=4096)


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (load_model, (None,), "directory: must be a string or a path, got None"),
        (Tokenizer, (b"here",), "directory: must be a string or a path, got b'here'"),
        (write_tiny_checkpoint, (None,), "directory: must be a string or a path, got None"),
        (TOKENIZER.encode, (None,), "text: must be a string, got NoneType"),
        (TOKENIZER.decode, ("12",), "ids: must be a list of token ids, got '12'"),
        (accelerate, (None,), "model: must be a torch.nn.Module, got NoneType"),
        (IndexerStage, (None, "sparse"), "model: must be a torch.nn.Module, got NoneType"),
        (Ranks, (2, 2), "rank: must be at most 1, got 2"),
        (Ranks, (0, 0), "size: must be at least 1, got 0"),
        (Ranks, (0, 2.0), "size: must be an integer, got 2.0"),
        (rope_frequencies, (63, 1e4), "dim: must be even, got 63"),
        (rope_frequencies, (64, float("nan")), "theta: must be a finite number above 0, got nan"),
        (yarn_frequencies, (64.0, 1e4), "dim: must be an integer, got 64.0"),
        (yarn_frequencies, (64, None), "theta: must be a number, got None"),
    ],
)
def test_wrong_arguments_are_refused_by_their_names(call, arguments, message):
    refused(message, call, *arguments)
