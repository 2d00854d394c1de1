"""GLM-5, 5.1 and 5.2: DeepSeek-V3.2's model with other options.

Rope rotates pairs (2i, 2i + 1) both in attention and in the indexer. In GLM-5.2 (IndexShare) only some layers have an
indexer and an index cache. A layer without an indexer attends to the same keys as the previous layer.
Source: GLM-5's report (arXiv 2602.15763), IndexShare (arXiv 2603.12201), and `GlmMoeDsa` of transformers 5.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import torch

from dsa_layers.batch import packing
from dsa_layers.batch.selected import Selected
from dsa_layers.batch.token_batch import TokenBatch, check_pass
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.config.fields import Fields, computed, each_of, integer, one_of, only
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.models.deepseek_v32 import (
    FP8_BLOCKS,
    TINY_CHANGES,
    DecoderBlock,
    DeepseekV32Config,
    DeepseekV32Drafter,
    DeepseekV32ForCausalLM,
)
from dsa_layers.models.family import Family, PublishedFormat, TinyFields

# {letter of index_topk_pattern: layer type}
_LETTERS = {"F": "full", "S": "shared"}


def read_indexer_types(fields: Fields, known: SimpleNamespace) -> tuple[str, ...]:
    """Read which layers have an indexer, from up to three fields, which must agree."""
    layers = known.num_hidden_layers
    counts = {layers: "num_hidden_layers"}
    frequency = fields.read("index_topk_freq", integer(default=1))
    # The first `offset` layers have an indexer, and after them every frequency-th layer.
    offset = fields.read("index_skip_topk_offset", integer(minimum=0, default=2))
    given = {}
    if listed := fields.read("indexer_types", each_of("full", "shared", counts=counts)):
        given["indexer_types"] = listed
    if letters := fields.read("index_topk_pattern", each_of(*_LETTERS, counts=counts)):
        given["index_topk_pattern"] = tuple(_LETTERS[letter] for letter in letters)
    if "index_topk_freq" in fields:
        schedule = (max(i - offset + 1, 0) % frequency == 0 for i in range(layers))
        given["index_topk_freq"] = tuple("full" if full else "shared" for full in schedule)
    if not given:
        return ("full",) * layers

    (first, types), *others = given.items()
    for name, other in others:
        for layer, (kind, expected) in enumerate(zip(other, types)):
            if kind != expected:
                raise fields.error(name, f"makes layer {layer} {kind!r}", f"{expected!r}, as field '{first}' says")
    if types[0] != "full":
        raise fields.error(first, f"makes layer 0 {types[0]!r}", "'full': no layer before it has selected anything")
    return types


@dataclass(frozen=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    """The fields of DeepSeek-V3.2's configuration, with other accepted values for the indexer."""

    model_type: ClassVar[str] = "glm_moe_dsa"
    checked = DeepseekV32Config.checked | {"moe_router_dtype": only("float32")}

    indexer_types: tuple[str, ...] = computed(read_indexer_types)
    indexer_rope_interleave: bool = only(True)
    index_share_for_mtp_iteration: bool = one_of(True, False, default=False)


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """`DeepseekV32ForCausalLM` with a `GlmMoeDsaConfig`."""


# Rows: an index that selects N rows of states. Slots: a function from Rows to int32 [N, K], the slots of each row's
# selected keys in the drafter's cache, padded with -1.
Rows = slice | torch.Tensor
Slots = Callable[[Rows], torch.Tensor]


@dataclass(frozen=True)
class DraftedStates:
    """The result of a drafter step, for later steps that attend to the keys that the first step selected.

    values  [T, hidden_size]: the hidden states
    slots   function that returns the cache slots of the keys that the first step attended to. It computes only the rows
            that are needed. None without a cache

    states[rows] returns the `DraftedStates` of these rows.
    """

    values: torch.Tensor
    slots: Slots | None

    def __getitem__(self, rows: Rows) -> "DraftedStates":
        return DraftedStates(self.values[rows], self.slots and self.slots(rows).__getitem__)


class GlmMoeDsaDrafter(DeepseekV32Drafter):
    """DeepSeek-V3.2's drafter. With `index_share_for_mtp_iteration` (GLM-5.2), only the first step selects keys.

    Let t be the last position with a state of the target, and S[t] the keys that the first step attended to at t. All
    later steps attend to S[t], although S[t] lacks the keys of their own tokens. With this option all steps return
    `DraftedStates`. A later step takes one token per sequence and the cache of the first step.
    Source: Z.ai's account of GLM-5.2, and vLLM's, SGLang's and TensorRT-LLM's code for it.
    """

    def forward(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor | DraftedStates,
        batch: TokenBatch,
        cache: PagedKVCache | None = None,
    ) -> torch.Tensor | DraftedStates:
        config = self._target[0].config
        if not config.index_share_for_mtp_iteration:
            return super().forward(tokens, states, batch, cache)
        check_pass(tokens, batch, cache)
        layer_cache = None if cache is None else cache.layer(0)
        if isinstance(states, DraftedStates):
            slots = _first_slots(states, batch, cache)
            selected = Selected(slots(slice(None)), batch, "slots")
            block = _without_indexer(self.block)
            y, _ = self._step(block, tokens, states.values, batch, layer_cache, selected)
        else:
            y, selected = self._step(self.block, tokens, states, batch, layer_cache)
            slots = None if cache is None else slots_of(selected, batch, config.index_topk)
        return DraftedStates(y, slots)

    def logits(self, states: torch.Tensor | DraftedStates) -> torch.Tensor:
        return super().logits(states.values if isinstance(states, DraftedStates) else states)


def _first_slots(states: DraftedStates, batch: TokenBatch, cache: PagedKVCache | None) -> Slots:
    if states.slots is None or cache is None:
        without = "the step that gave states" if states.slots is None else "this one"
        raise ValueError(
            "cache: must be the first step's, in which a further one reads the keys that it selected "
            f"(index_share_for_mtp_iteration), got none in {without}"
        )
    if not batch.is_decode:
        raise ValueError(
            "batch: a further step takes one token of each sequence (index_share_for_mtp_iteration), got "
            f"{list(batch.query_lens)}"
        )
    return states.slots


def slots_of(selected: Selected, batch: TokenBatch, top_k: int) -> Slots:
    """Return a function from rows to the cache slots of the keys that a pass attended to.

    selected, batch: the selected keys and the batch of the pass. top_k: of the indexer.
    """
    indices = selected.topk_indices
    if indices is not None:
        (indices,) = selected.placement.all_gather(indices)
    if indices is not None and selected.counted_in == "slots":
        return indices.__getitem__

    def found(rows: Rows) -> torch.Tensor:
        if indices is None:  # each token attends to all keys that it sees, at most top_k
            keys = torch.arange(top_k, dtype=torch.int32, device=batch.device)
            keys = torch.where(keys < batch.visible_keys[rows, None], keys, -1)
        elif selected.counted_in == "positions":
            keys = indices[rows]
        else:
            keys = packing.positions_of_rows(indices[rows], batch.key_starts[rows])
        return packing.selected_slots(batch.block_table, batch.page_size, batch.sequences[rows], keys)

    return found


def _without_indexer(block: DecoderBlock) -> DecoderBlock:
    """Return a copy of the block without an indexer. Both blocks share the other parameters."""
    other = copy.copy(block)
    other._modules = block._modules | {"self_attn": _attention_without_indexer(block.self_attn)}
    return other


def _attention_without_indexer(attention: DSAAttention) -> DSAAttention:
    other = copy.copy(attention)
    other._modules = attention._modules | {"indexer": None}
    if getattr(attention, "part", None) is not None:
        vars(other)["part"] = _attention_without_indexer(attention.part)
    return other


FAMILY = Family(
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PublishedFormat(norm_dtype="BF16"),
    # GLM-5.2
    TinyFields(
        "glm_5_2_config.json",
        {
            **TINY_CHANGES,
            "eos_token_id": [1],
            "index_skip_topk_offset": 2,
            "index_topk_freq": 2,
            "indexer_types": ["full", "full", "shared", "full", "shared"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
            "num_hidden_layers": 5,
            "pad_token_id": 1,
            "quantization_config": FP8_BLOCKS,
        },
    ),
    GlmMoeDsaDrafter,
)
