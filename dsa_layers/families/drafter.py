"""The protocol of a model's drafter, and which checkpoints have one."""

from typing import Any, Protocol

import torch

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.cache import Cache


class Drafter(Protocol):
    """A multi-token-prediction layer, the model's `drafter`: it guesses a token further ahead than the model does.

    drafter(tokens int64 [T], states [T, ...], batch, cache=None) -> states [T, ...]
    tokens   of each position of `batch` the token behind it
    states   of each position of `batch` the target's (its method `states`), or those that an earlier step of the
             drafter gave there: a step at position t drafts the token at t + 2, and the next one, at t + 1 with that
             token and these states, the token at t + 3. What a step gives is a tensor, or something of which `[rows]`
             are some rows, as of a tensor, and which `logits` and further steps read
    cache    its own, of `make_cache`, which keeps what this layer computed at earlier positions. It is addressed by
             the pages and state slots of the target's cache, with as many of them: the same batch serves both, and
             nothing is allocated here. A position that a later pass has again is written again: those of drafts get
             the target's states so. Of a sequence's last positions DRAFTS (`compressed_kv_cache`) can be taken back

    Any result is only a guess: tokens that a target accepts are its own, whatever the drafter computes.
    """

    page_size: int

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """fp32 [N, vocab_size] of any N rows of states that a step gave: for the token two behind each position."""

    def make_cache(
        self, num_pages: int, page_size: int = ..., device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> Cache:
        """A cache of one layer."""

    def __call__(
        self, tokens: torch.Tensor, states: torch.Tensor, batch: TokenBatch, cache: Any = None
    ) -> torch.Tensor: ...


def check_states(states: torch.Tensor, tokens: torch.Tensor, *row: int) -> None:
    """Raises ValueError unless there is a row of states of this shape for every token."""
    shape = (*tokens.shape, *row)
    if tokens.dim() != 1 or tuple(states.shape) != shape:
        raise ValueError(f"states: must be {list(shape)}, a row for each of tokens [T], got {list(states.shape)}")
