"""Drafts that are often right. A drafter with random weights is almost never right."""

import torch

from dsa_layers.generation.steps import DraftStep


class Guesses:
    """A function that drafts the next `drafts` tokens of truth[s.index] for each sequence s, about 30% of them replaced
    by 1."""

    def __init__(self, truth, drafts):
        self.truth, self.drafts, self.generator = truth, drafts, torch.Generator().manual_seed(drafts)

    def __call__(self, sequences):
        found = []
        for s in sequences:
            coming = self.truth[s.index][len(s.tokens) - s.prompt_len :][: self.drafts]
            coming = coming + [0] * (self.drafts - len(coming))
            right = torch.rand(self.drafts, generator=self.generator) < 0.7
            found.append([token if ok else 1 for token, ok in zip(coming, right.tolist())])
        return found


def guess(monkeypatch, guesses=None):
    """Replace the drafter's drafts by guesses(sequences), unless `guesses` is None. Return a list to which each
    drafting pass appends, for each sequence, (its tokens, the drafter's drafts after them)."""
    seen = []
    for name in ("__call__", "after_prompts"):
        made = getattr(DraftStep, name)

        def noted(self, sequences, *rest, made=made):
            found = made(self, sequences, *rest)
            seen.extend((list(s.tokens), own) for s, own in zip(sequences, found))
            return found if guesses is None else guesses(sequences)

        monkeypatch.setattr(DraftStep, name, noted)
    return seen
