"""Drafts that are often right, like those of a trained drafter. With random weights, drafts are almost never right."""

import torch

from dsa_layers.generation.steps import DraftStep


class Guesses:
    """A function that drafts the next `drafts` tokens of each sequence's `truth`, but replaces about 30% by token 1."""

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
    """Replace the drafter's drafts by guesses(sequences), unless `guesses` is None. Return a list that grows with each
    drafting pass, by (tokens, the drafter's drafts after these tokens) of each sequence."""
    seen = []
    for name in ("__call__", "after_prompts"):
        made = getattr(DraftStep, name)

        def noted(self, sequences, *rest, made=made):
            found = made(self, sequences, *rest)
            seen.extend((list(s.tokens), own) for s, own in zip(sequences, found))
            return found if guesses is None else guesses(sequences)

        monkeypatch.setattr(DraftStep, name, noted)
    return seen
