"""The interfaces that generation and loading require of a model."""

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

    config           the configuration; generation reads vocab_size, max_position_embeddings and eos_token_ids
    page_size        default number of tokens per page of the cache
    captures_decode  whether a CUDA graph can capture a decoding pass
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
    """A multi-token-prediction layer of a model, the target. The drafter predicts one token further ahead than the
    target.

    drafter(tokens int64 [T], states [T, ...], batch, cache=None) -> states [T, ...]

    tokens  for each position of `batch`, the token at the next position
    states  for each position of `batch`, the result of the target's method `states`, or the result of an earlier step
            of the drafter. A step at position t drafts the token at t + 2. The next step, at t + 1 with the drafted
            token and the resulting states, drafts the token at t + 3. A step returns a tensor, or an object that
            supports `[rows]` and that `logits` and later steps accept
    cache   a cache from the drafter's `make_cache`, with the keys of this layer at earlier positions. It has as many
            pages and state slots as the target's cache, so one batch addresses both. A later pass may repeat the last
            DRAFTS positions of a sequence (`dsa_layers/cache/drafts.py`) and overwrites them in the cache, for example
            with keys from the target's states
    """

    page_size: int

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [N, vocab_size] for any N rows of a step's states. A row at position t predicts the token
        at position t + 2."""

    def make_cache(
        self, num_pages: int, page_size: int = ..., device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> Cache:
        """Return a cache for the drafter's layer."""

    def __call__(
        self, tokens: torch.Tensor, states: torch.Tensor, batch: TokenBatch, cache: Any = None
    ) -> torch.Tensor: ...


class CheckpointModel(Model, Protocol):
    """The interface that `load_model` requires in addition to `Model`. The model is a torch.nn.Module on the meta
    device.

    name_of       method that returns the model's name for a tensor of the checkpoint; raises CheckpointError for a
                  tensor of an unsupported variant
    stored_name   method that returns the checkpoint's name for a tensor of the model: for a tensor of the drafter, the
                  name in the multi-token-prediction layer `mtp_layer`
    other_parts   name prefixes of tensors that the model never has, such as those of an image encoder
    skips         method that returns whether the loader skips a tensor of the checkpoint, because the model has no such
                  part or the tensor is a copy of another one
    init_buffers  method that computes, on a device, the buffers that no checkpoint stores
    drafter       the `Drafter` if the caller of `load_model` requested it, else None

    In a family with drafters, the model also has two methods. states(tokens, batch, cache=None) returns the states of
    all tokens, which the drafter reads. logits(states) returns the logits for any rows of states.

    A module of the model may have a method `check_values()`, which `load_model` calls after loading. It raises
    ValueError for values that a forward pass does not support; the message begins with the tensor's name.
    """

    drafter: Drafter | None
    other_parts: tuple[str, ...]

    def name_of(self, stored: str) -> str: ...

    def stored_name(self, name: str, mtp_layer: int = 0) -> str: ...

    def skips(self, name: str) -> bool: ...

    def init_buffers(self, device: torch.device | str) -> None: ...


def check_states(states: torch.Tensor, tokens: torch.Tensor, *row: int) -> None:
    """Raise ValueError unless tokens has one dimension [T] and states has the shape [T, *row]."""
    shape = (*tokens.shape, *row)
    if tokens.dim() != 1 or tuple(states.shape) != shape:
        raise ValueError(f"states: must be {list(shape)}, a row for each of tokens [T], got {list(states.shape)}")
