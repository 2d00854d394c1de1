"""Check that a batch-invariant generator computes the same tokens and logits for a sequence alone, in a batch, and with
draft tokens."""

import pytest
import torch

from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.generation.steps import DecodeStep
from tests.layers.generation.guesses import Guesses, guess

PROMPTS = [
    list(range(100, 250)),
    [7, 8, 9],
    *([i + 5, *range(10, 10 + i * 53 % 140)] for i in range(69)),
    list(range(300, 620)),  # long enough that several ranks divide this prompt's tokens
]
ALONE = [0, 1, 2, 40, 70, 71]
NEW_TOKENS = 96


def assert_batch_invariant(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """-> the new tokens of each sequence"""
    sizes = {"cache_tokens": 64 * 5 * len(PROMPTS), "max_sequences": len(PROMPTS), "batch_invariant": True}
    step, seen, params = DecodeStep.__call__, {}, SamplingParams(NEW_TOKENS)

    def noted(self, sequences):
        results = logits, _ = step(self, sequences)
        for s, rows in zip(sequences, logits.clone()):
            seen.update((tuple(s.tokens + list(s.drafts[:i])), row) for i, row in enumerate(rows))
        return results

    def generate(prompts, truth=None, **options):
        seen.clear()
        with monkeypatch.context() as patch:
            patch.setattr(DecodeStep, "__call__", noted)
            if truth is not None:
                guess(patch, Guesses(truth, options["draft_tokens"]))
            generator = Generator(model, **sizes, **options)
            tokens = [c.tokens for c in generator.generate(prompts, params)]
        return tokens, dict(seen), generator.throughput.taken

    truth, logits, _ = generate(PROMPTS)
    for i in ALONE:
        (tokens,), alone, _ = generate([PROMPTS[i]])
        assert tokens == truth[i] and len(alone) == len(tokens) - 1
        assert all(torch.equal(row, logits[key]) for key, row in alone.items())
    for drafts, numbers in ((1, range(len(PROMPTS))), (2, ALONE), (3, ALONE), (3, [1])):
        own = [truth[i] for i in numbers]
        tokens, drafted, taken = generate([PROMPTS[i] for i in numbers], own, draft_tokens=drafts)
        assert tokens == own and taken > 30 * len(own)
        # The run without drafts has no logits for tokens that include a wrong draft.
        known = drafted.keys() & logits.keys()
        assert len(known) > 85 * len(own) and all(torch.equal(drafted[key], logits[key]) for key in known)
    return truth
