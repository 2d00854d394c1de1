"""The interfaces of models that generation and loading require."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.kv_cache import Cache
from dsa_layers.config.model_config import ModelConfig


@runtime_checkable
class Model(Protocol):
    """The interface that generation requires. `Generator` accepts any object with these attributes.

    config           the configuration; generation reads the vocabulary, context and end-of-sequence ids
    page_size        default number of tokens per page of the cache
    captures_decode  whether a decoding pass reads no lengths from the host, so that one CUDA graph is valid for all
                     lengths
    make_cache       method that returns a cache with `num_pages` pages for up to `state_slots` sequences
    parameters       method that returns an iterator over the parameters, as in torch.nn.Module
    model(tokens int64 [T], batch, cache=None, all_tokens=False) -> fp32 logits [B, vocab_size] for each sequence's last
                     token; [T, vocab_size] for all tokens with all_tokens=True and in decoding passes
    """

    config: ModelConfig
    page_size: int
    captures_decode: bool

    def make_cache(
        self, num_pages: int, page_size: int = ..., device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> Cache: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def __call__(
        self, tokens: torch.Tensor, batch: TokenBatch, cache: Any = None, *, all_tokens: bool = False
    ) -> torch.Tensor: ...


class Drafter(Protocol):
    """A multi-token-prediction layer, the `drafter` of a model. It predicts one token further ahead than that model,
    the target.

    drafter(tokens int64 [T], states [T, ...], batch, cache=None) -> states [T, ...]

    tokens  for each position of `batch`, the token at the next position
    states  for each position of `batch`, the result of the target's method `states`, or the result of an earlier step
            of the drafter. A step at position t drafts the token at t + 2. The next step, at t + 1 with the drafted
            token and the resulting states, drafts the token at t + 3. A step returns a tensor, or an object that
            supports `[rows]` and that `logits` and later steps accept
    cache   a cache from the drafter's `make_cache`, with the keys of this layer at earlier positions. It has the same
            number of pages and state slots as the target's cache, so one batch addresses both caches and the drafter
            allocates no pages. If a later pass repeats a position, it overwrites the position in the cache. In this
            way the target's states replace the drafted states. The last DRAFTS positions of a sequence
            (`dsa_layers/cache/drafts.py`) can be rolled back

    A draft is only a guess. The target accepts it only if the target chooses the same token.
    """

    page_size: int

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [N, vocab_size] for any N rows of a step's states.

        The logits for a row at position t predict the token at position t + 2.
        """

    def make_cache(
        self, num_pages: int, page_size: int = ..., device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> Cache:
        """Return a cache for the drafter's layer."""

    def __call__(
        self, tokens: torch.Tensor, states: torch.Tensor, batch: TokenBatch, cache: Any = None
    ) -> torch.Tensor: ...


class CheckpointModel(Model, Protocol):
    """The interface that `load_model` requires in addition to `Model`.

    The model is a torch.nn.Module on the meta device. It maps names in a checkpoint to its tensors.

    name_of       method that returns the model's name for a tensor of the checkpoint; raises CheckpointError for a
                  tensor of an unsupported variant
    stored_name   method that returns the checkpoint's name for a tensor of the model. For a tensor of the drafter, this
                  is the name in the multi-token-prediction layer `mtp_layer`
    skips         method that returns whether a checkpoint's tensor belongs to a part that the model does not have
    init_buffers  method that computes, on a device, the buffers that no checkpoint stores
    drafter       the `Drafter` if the caller of `load_model` requested it, else None

    In a family with drafters, the model's forward pass consists of two methods. states(tokens, batch, cache=None)
    returns the states of all tokens, which the drafter reads. logits(states) accepts any rows of states.

    A module of the model may have a method `check_values()`. `load_model` calls it after the module's tensors are
    loaded. It raises ValueError for values that a forward pass does not support; the message begins with the tensor's
    name.
    """

    drafter: Drafter | None

    def name_of(self, stored: str) -> str: ...

    def stored_name(self, name: str, mtp_layer: int = 0) -> str: ...

    def skips(self, name: str) -> bool: ...

    def init_buffers(self, device: torch.device | str) -> None: ...


def check_states(states: torch.Tensor, tokens: torch.Tensor, *row: int) -> None:
    """Raise ValueError unless tokens has one dimension [T] and states has the shape [T, *row]."""
    shape = (*tokens.shape, *row)
    if tokens.dim() != 1 or tuple(states.shape) != shape:
        raise ValueError(f"states: must be {list(shape)}, a row for each of tokens [T], got {list(states.shape)}")
