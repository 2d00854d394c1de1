"""What every family's configuration and model have."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.cache import Cache
from dsa_layers.families.declared import Declared, computed, epsilon, integer, number, only, token_ids
from dsa_layers.families.drafter import Drafter
from dsa_layers.families.fields import MAX_EXPERTS, MAX_HEADS, MAX_TOKENS
from dsa_layers.families.parts import QuantizationConfig, read_bos, read_dtype, read_quantization


@dataclass(frozen=True)
class ModelConfig(Declared):
    """The fields of config.json that all families have. A family's configuration is a subclass with its own fields.

    Names are config.json's; dimensions are in elements.
    model_type: the family's. eos_token_ids: every id that ends a sequence, () if there is none. bos_token_id: None if
    there is none. dtype: of the tensors that are not quantised: "bfloat16", "float16" or "float32". quantization: None
    if no tensor is quantised.
    fp8_cache_sizes: field of config.json -> the size that it must have for latents to be cached in FP8
    """

    model_type: ClassVar[str]
    fp8_cache_sizes: ClassVar[dict[str, int]]
    checked: ClassVar[dict[str, Any]] = {
        "hidden_act": only("silu"),
        "attention_bias": only(False),
        "mlp_bias": only(False),
        "attention_dropout": only(0),
        "topk_method": only("noaux_tc"),
        "tie_word_embeddings": only(False),
    }

    vocab_size: int = integer(maximum=2**24)
    hidden_size: int = integer()
    num_hidden_layers: int = integer(maximum=2**8)
    num_nextn_predict_layers: int = integer(minimum=0, maximum=16, default=0)
    num_attention_heads: int = integer(maximum=MAX_HEADS)
    q_lora_rank: int = integer()
    index_n_heads: int = integer(maximum=MAX_HEADS)
    index_head_dim: int = integer()
    index_topk: int = integer(maximum=2**16)  # each token has a row of as many indices
    moe_intermediate_size: int = integer()
    n_routed_experts: int = integer(maximum=MAX_EXPERTS)
    n_shared_experts: int = integer(maximum=2**10)
    num_experts_per_tok: int = integer()
    routed_scaling_factor: float = number()
    rms_norm_eps: float = epsilon()
    max_position_embeddings: int = integer(maximum=MAX_TOKENS)
    bos_token_id: int | None = computed(read_bos)
    eos_token_ids: tuple[int, ...] = computed(
        lambda fields, known: fields.read("eos_token_id", token_ids(known.vocab_size))
    )
    quantization: QuantizationConfig | None = computed(
        lambda fields, known: read_quantization(fields.object("quantization_config"))
    )
    dtype: str = computed(read_dtype)

    def fp8_widths(self) -> dict[str, int]:
        """Field of config.json -> a width that follows from it and that FP8 cuts into blocks of 128.
        Of models that have experts, moe_intermediate_size is one."""
        raise NotImplementedError

    def with_heads(self, heads: int) -> Self:
        """The configuration of one GPU's share, so many attention heads. ValueError for what is no share of them."""
        raise NotImplementedError


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
