"""The protocols of a model and of its configuration, which every family follows."""

from collections.abc import Iterator
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.cache import Cache
from dsa_layers.families.drafter import Drafter
from dsa_layers.families.parts import QuantizationConfig


class ModelConfig(Protocol):
    """What every family's configuration has: what loading and generation read.

    model_type: the family's. eos_token_ids: every id that ends a sequence, () if there is none. bos_token_id: None if
    there is none. dtype: of the tensors that are not quantised: "bfloat16", "float16" or "float32". quantization: None
    if no tensor is quantised.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    n_routed_experts: int
    index_head_dim: int
    index_topk: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None
    dtype: str

    def fp8_widths(self) -> dict[str, int]:
        """Field of config.json -> a width that follows from it and that FP8 cuts into blocks of 128.
        Of models that have experts, moe_intermediate_size is one."""

    def fp8_cache_sizes(self) -> dict[str, int]:
        """Field of config.json -> the size that it must have for latents to be cached in FP8."""

    def with_heads(self, heads: int) -> Self:
        """The configuration of one GPU's share, so many attention heads. ValueError for what is no share of them."""


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
