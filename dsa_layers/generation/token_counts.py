"""How often a sequence has each token, for penalties."""

from collections.abc import Sequence

import torch

from dsa_layers.batch import packing


class TokenCounts:
    """The tokens of one sequence, on the device of its logits. in_prompt: bool [vocab_size]; generated: int32
    [vocab_size], how often each token was generated."""

    def __init__(self, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[packing.to_device(sorted(set(prompt)), torch.int64, device)] = True
        self.generated = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self._counted = len(prompt)

    def update(self, tokens: Sequence[int]) -> None:
        """Count the sequence's tokens that have come since the last call."""
        if len(tokens) > self._counted:
            new = packing.to_device(tokens[self._counted :], torch.int64, self.generated.device)
            self.generated.scatter_add_(0, new, torch.ones_like(new, dtype=torch.int32))
            self._counted = len(tokens)
