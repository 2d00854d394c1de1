"""What generation and loading ask of a model."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.cache import Cache
from dsa_layers.config.model_config import ModelConfig


@runtime_checkable
class Model(Protocol):
    """What generation asks of a model: `Generator` takes anything that has this.

    config           its vocabulary, context and end-of-sequence ids are read
    page_size        tokens a page of its cache, unless a caller wants another number
    captures_decode  whether a pass over one new token of each sequence reads no lengths from the host, so that a CUDA
                     graph of it holds for any lengths
    make_cache       a cache for `num_pages` pages and for `state_slots` sequences at a time
    model(tokens int64 [T], batch, cache=None) -> fp32 logits [B, vocab_size] of each sequence's last token, or of all T
                     tokens with all_tokens=True
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


class CheckpointModel(Model, Protocol):
    """What `load_model` asks of a model in addition. The model is a torch.nn.Module, made on the meta device, and tells
    which of a checkpoint's tensors are its own.

    name_of       the model's name of a checkpoint's tensor; CheckpointError for one of a variant that is not supported
    stored_name   the checkpoint's name of a tensor of the model. For a tensor of the drafter, the name in the
                  multi-token-prediction layer `mtp_layer`
    skips         whether a checkpoint's tensor is of a part that the model does not have
    init_buffers  computes on a device what no checkpoint stores

    drafter       the layer that guesses tokens further ahead, where `load_model` was asked for it; else None. A model
                  of a family with drafters has two methods of which its forward pass is made: states(tokens, batch,
                  cache=None), of all tokens, which the drafter reads, and logits(any rows of states)

    A module of the model may have `check_values()`, which is called once its tensors are loaded. It raises ValueError,
    with the tensor's name first, for values that a forward pass must not meet.
    """

    drafter: Drafter | None

    def name_of(self, stored: str) -> str: ...

    def stored_name(self, name: str, mtp_layer: int = 0) -> str: ...

    def skips(self, name: str) -> bool: ...

    def init_buffers(self, device: torch.device | str) -> None: ...

    def state_dict(self) -> dict[str, torch.Tensor]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def get_parameter(self, target: str) -> nn.Parameter: ...

    def train(self, mode: bool = True) -> "CheckpointModel": ...


def check_states(states: torch.Tensor, tokens: torch.Tensor, *row: int) -> None:
    """Raises ValueError unless there is a row of states of this shape for every token."""
    shape = (*tokens.shape, *row)
    if tokens.dim() != 1 or tuple(states.shape) != shape:
        raise ValueError(f"states: must be {list(shape)}, a row for each of tokens [T], got {list(states.shape)}")
