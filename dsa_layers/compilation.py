"""List the compiled kernel variants that the passes of a model need.

A variant is a kernel compiled for certain arguments, such as dtypes and a tile (dsa/runtime/variants.py). This module
runs prefill and decoding passes of many sizes on the meta device, and records the variants that they request.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dsa.parallel.one_shot_sum import RANKS, compiled_sums
from dsa.runtime.asked_variants import asked_variants
from dsa.runtime.variants import Variant, growing, with_all_tiles
from dsa_layers.batch.decode_batch import DecodeInputs
from dsa_layers.batch.sequence_batch import Chunk, prefill_batch
from dsa_layers.cache.kv_cache import Cache
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.engine.fuse import fuse, prepare
from dsa_layers.engine.split import split
from dsa_layers.io.loading import unfilled_model
from dsa_layers.layers.key_selection import FUSED_TOKENS
from dsa_layers.models.deepseek_v32 import DecoderBlock
from dsa_layers.models.precision import Precision
from dsa_layers.models.protocols import CheckpointModel
from dsa_layers.parallel.ranks import Ranks

MOST_ROWS = 32768  # limit of a prefill pass's new tokens
MOST_SEQUENCES = 1024  # limit of a decoding pass
MOST_KEYS = 2**24  # limit of a decoding pass: number of sequences * tokens of the longest sequence
# Limit of a prefill pass's index scores: new tokens * earlier tokens. A pass with more scores would only have more
# chunks (`KeySelection.select_packed`). Passes of up to FUSED_TOKENS new tokens are exempt, so that they also request
# the kernels of `dsa.indexer_select`.
MOST_SCORES = 2**29
META = torch.device("meta")


def model_variants(config: ModelConfig, precision: Precision, *, drafts: int = 0, gpus: int = 1) -> list[Variant]:
    """Return the kernel variants for sm_90 that a generator's passes over the model request, sorted.

    The result also contains the shipped variants that differ from a requested variant only in the tile.
    drafts: the number of draft tokens; if it is above 0, the drafter's variants are included
    gpus: the number of GPUs that share the model. The result is the variants of one rank, with the kernels of
    `dsa.parallel.one_shot_sum` for 2 to 8 GPUs
    Raises DoesNotDivide, a ValueError, if the GPUs cannot share the model evenly.
    """
    model, cache = without_memory(config, precision, drafter=drafts > 0, gpus=gpus)
    with asked_variants("sm_90") as asked:
        run_passes(model, cache, drafts)
        if gpus in RANKS:
            compiled_sums(gpus)
    return sorted(with_all_tiles(asked), key=repr)


@dataclass(frozen=True)
class SilentRanks(Ranks):
    """Ranks without communication. Tensors on the meta device have no content to send."""

    def all_gather(self, parts: torch.Tensor, x: torch.Tensor, *, async_op: bool = False) -> None:
        pass

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, *rows: list[int], async_op: bool = False) -> None:
        pass


def without_memory(
    config: ModelConfig, precision: Precision, *, drafter: bool = False, gpus: int = 1
) -> tuple[CheckpointModel, Cache]:
    """Return the model on the meta device, fused and split as by `load_model`, and a cache for the model.

    Only the first layer of each kind (`_kind`) runs. The other layers pass on their input.
    drafter: whether the model has its drafter
    gpus: the number of GPUs that share the model; the result is one rank's part
    Raises DoesNotDivide if the GPUs cannot share the model evenly.
    """
    model = unfilled_model(config, precision, drafter=drafter)
    fuse(model)
    split(model, SilentRanks(0, gpus), blocks=config.quantization is not None)
    model.init_buffers(META)
    prepare(model)
    pages = -(-config.max_position_embeddings // model.page_size)
    cache = model.make_cache(pages, model.page_size, META, state_slots=MOST_SEQUENCES)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == config.num_hidden_layers)
    kinds = {}
    for layer in layers:
        if kinds.setdefault(_kind(layer), layer) is not layer:
            layer.forward = _passing_on(layer)
    return model.train(False), cache


def _passing_on(layer: nn.Module) -> Callable[..., Any]:
    """Return a `forward` for `layer` that launches no kernel. Its result has the form of the layer's result."""
    if isinstance(layer, DecoderBlock):
        return lambda x, *others: (x, others[-1])  # (x, selected)
    if layer.following:
        return lambda streams, *_: streams
    return lambda mixed, *_: mixed.streams  # the last block returns only the streams


def _kind(layer: nn.Module) -> tuple:
    """Return a key. Layers with equal keys request the same kernels."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    return layer.is_last, modules, tuple((name, x.shape, x.dtype) for name, x in layer.named_parameters())


def run_passes(model: CheckpointModel, cache: Cache, drafts: int = 0) -> None:
    """Run prefill passes of one and of several sequences, with and without earlier tokens, and decoding passes.

    drafts: the number of draft tokens, above 0 if the model has a drafter. The drafter's passes then follow the model's
    """
    context, top_k = model.config.max_position_embeddings, model.config.index_topk
    lengths = [n for n in (1, top_k, 4 * top_k, 16 * top_k) if n < context]
    for rows in growing(min(MOST_ROWS, context), 1.3):
        prefill(model, cache, [(rows, 0)])
    for rows in growing(min(MOST_ROWS, context), 8):
        for cached in (0, *lengths, context - rows):
            new = min(rows, context - cached, max(MOST_SCORES // (cached + 1), FUSED_TOKENS))
            prefill(model, cache, [(new, cached)])
            prefill(model, cache, [(-(-new // 3), cached)] * 3)
            prefill(model, cache, [(new, 0), (1, cached)])
    for count in growing(MOST_SEQUENCES, 1.6):
        for tokens in (*lengths, context):
            decode(model, cache, count, min(tokens, MOST_KEYS // count), drafts)


@torch.inference_mode()
def prefill(model: CheckpointModel, cache: Cache, sequences: list[tuple[int, int]]) -> None:
    """Run a prefill pass of the model and, if it has a drafter, of the drafter.

    sequences: (number of new tokens, number of earlier tokens) of each sequence. All sequences can use the same pages,
    because nothing is written on the meta device
    """
    pages = range(-(-max(map(sum, sequences)) // cache.page_size))
    chunks = [Chunk(new, cached, pages, slot) for slot, (new, cached) in enumerate(sequences)]
    tokens = torch.zeros(sum(new for new, _ in sequences), dtype=torch.int64, device=META)
    batch = prefill_batch(chunks, cache.page_size, META)
    if model.drafter is None:
        model(tokens, batch, cache)
        return
    states = model.states(tokens, batch, cache)
    model.logits(states[batch.last_tokens])
    states = model.drafter(tokens, states, batch, _drafters(model, cache))
    model.drafter.logits(states[batch.last_tokens])


@torch.inference_mode()
def decode(model: CheckpointModel, cache: Cache, count: int, tokens: int, drafts: int = 0) -> None:
    """Run a decoding pass over the last token and the `drafts` draft tokens of each of `count` sequences. With drafts,
    also run the drafter's passes. The block table has pages for `tokens` tokens per sequence."""
    pages, size = -(-tokens // cache.page_size), cache.page_size
    inputs = DecodeInputs(count, pages, size, META, 1 + drafts)
    if not drafts:
        model(inputs.tokens, inputs.batch(), cache)
        return
    states, drafters = model.states(inputs.tokens, inputs.batch(), cache), _drafters(model, cache)
    model.logits(states)
    states = model.drafter(inputs.tokens, states, inputs.batch(), drafters)
    one = DecodeInputs(count, pages, size, META)
    model.drafter.logits(model.drafter(one.tokens, states[:count], one.batch(), drafters))


def _drafters(model: CheckpointModel, cache: Cache) -> Cache:
    """Return a cache for the drafter, with as many pages as `cache`, of the same size."""
    return model.drafter.make_cache(cache.allocator.num_pages, cache.page_size, META, state_slots=MOST_SEQUENCES)
