"""dots3-note's text model: layers with an indexer, and layers with a sliding window and wider latents.

By default, layers 0, 1, 5, 9, ... have an indexer. In both kinds of layers, the RMSNorms of latents also multiply by
sqrt(hidden_size / rank), rope keys are normalised, and each head has a gate.
Source: `Dots3Note` of transformers 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from dsa_layers.cache.windowed_kv_cache import WindowedKVCache
from dsa_layers.config.fields import (
    MAX_HEADS,
    Declared,
    Fields,
    anything,
    computed,
    each_of,
    integer,
    number,
    only,
    refused,
)
from dsa_layers.config.model_config import THETA, RopeConfig
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.rope import Angles, make_rotary
from dsa_layers.layers.window_attention import WindowAttention
from dsa_layers.models.deepseek_v32 import (
    FP8_BLOCKS,
    TINY_CHANGES,
    DecoderBlock,
    DeepseekV32Config,
    DeepseekV32Drafter,
    DeepseekV32ForCausalLM,
    DeepseekV32Model,
    attention,
    cache_layers,
    mlp,
    read_dense_layers,
)
from dsa_layers.models.family import Family, PublishedFormat, TinyFields
from dsa_layers.models.precision import Precision

_WINDOW, _FULL = "sliding_attention", "indexed_attention"  # layer_types of transformers 5
_LISTED = _FULL, "full_attention", _WINDOW  # published files say "full_attention" for layers with an indexer


@dataclass(frozen=True)
class WindowConfig(Declared):
    """The sizes of the layers with a window, the base of their rope, and the window in tokens."""

    num_attention_heads: int = integer(maximum=MAX_HEADS)
    q_lora_rank: int = integer()
    kv_lora_rank: int = integer()
    qk_nope_head_dim: int = integer()
    qk_rope_head_dim: int = integer()
    v_head_dim: int = integer()
    rope_theta: float = number()
    window: int = integer()


_SIZES = "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"


def _read_layers(fields: Fields, known: SimpleNamespace) -> tuple[bool, ...]:
    """Read which layers have a window."""
    layers = known.num_hidden_layers
    listed = fields.read("layer_types", each_of(*_LISTED, counts={layers: "num_hidden_layers"}))
    if listed is None:
        return tuple(i >= 2 and i % 4 != 1 for i in range(layers))
    return tuple(kind == _WINDOW for kind in listed)


def _read_rope(fields: Fields, known: SimpleNamespace, kind: str = _FULL, name: str = "rope_theta") -> RopeConfig:
    """Read the rope of layers of a `kind`: the published field `name`, or transformers' object for the kind in
    rope_parameters."""
    nested = fields.object("rope_parameters")
    if nested is None:
        return RopeConfig(fields.read(name, THETA), None)
    of_kind = nested.object(kind)
    nested.require(of_kind is not None, kind, "an object")
    of_kind.read("rope_type", only("default"))
    of_kind.read("partial_rotary_factor", anything())  # rope channels / all channels of a head
    theta = of_kind.read("rope_theta", THETA)
    of_kind.reject_unread()
    for other in (_FULL, _WINDOW):
        nested.read(other, anything())  # other calls of this function read it
    nested.reject_unread()
    return RopeConfig(theta, None)


def _read_window(fields: Fields, known: SimpleNamespace) -> WindowConfig | None:
    """Read the sizes of the layers with a window. Published files have fields with the prefix "swa_" for them. Files of
    transformers 5 have the object per_layer_config with the values that differ from the other layers' values."""
    if not any(known.windowed):
        fields.read("sliding_window", anything())
        return None
    window = integer(maximum=2**16, default=None)
    name = "sliding_window" if "sliding_window" in fields else "sliding_window_size"
    found = {"window": fields.read(name, integer(maximum=2**16))}
    fields.require(fields.read("sliding_window_size", window) in (None, found["window"]), "sliding_window_size", "as "
                   "field 'sliding_window' says")  # fmt: skip
    found["rope_theta"] = _read_rope(fields, known, _WINDOW, "swa_rope_theta").theta
    by_layer = fields.object("per_layer_config")
    found["qk_rope_head_dim"] = known.qk_rope_head_dim
    if by_layer is not None:
        for name in (*_SIZES, "head_dim", "num_key_value_heads", "qk_rope_head_dim"):
            fields.read(f"swa_{name}", refused("per_layer_config has the sizes of layers with a window"))
        layers = [_of_layer(by_layer, i, known) for i, windowed in enumerate(known.windowed) if windowed]
        by_layer.reject_unread()
        fields.require(
            layers.count(layers[0]) == len(layers), "per_layer_config", "equal sizes of layers with a window"
        )
        found |= layers[0]
    else:
        found |= {size: fields.read(f"swa_{size}", integer()) for size in _SIZES}
        heads = found["num_attention_heads"]
        fields.read("swa_num_key_value_heads", only(heads))
        rope = fields.read("swa_qk_rope_head_dim", integer(default=None))
        head = fields.read("swa_head_dim", integer())
        found["qk_rope_head_dim"] = head - found["qk_nope_head_dim"]
        fields.require(rope in (None, found["qk_rope_head_dim"]), "swa_qk_rope_head_dim", "swa_head_dim - "
                       "swa_qk_nope_head_dim")  # fmt: skip
        fields.require(found["qk_rope_head_dim"] == known.qk_rope_head_dim, "swa_head_dim", "swa_qk_nope_head_dim and "
                       f"{known.qk_rope_head_dim} channels with rope, as in the other layers")  # fmt: skip
    return WindowConfig(**found)


def _of_layer(by_layer: Fields, layer: int, known: SimpleNamespace) -> dict[str, int]:
    """Read the sizes of a layer with a window from per_layer_config."""
    sizes = {size: getattr(known, size) for size in _SIZES}
    own = by_layer.object(str(layer))
    if own is None:
        return sizes
    found = {size: own.read(size, integer(default=value)) for size, value in sizes.items()}
    own.read("num_key_value_heads", only(found["num_attention_heads"]))
    own.read("qk_rope_head_dim", only(known.qk_rope_head_dim))
    own.read("head_dim", anything())
    own.reject_unread()
    return found


@dataclass(frozen=True)
class Dots3NoteConfig(DeepseekV32Config):
    """The fields of DeepSeek-V3.2's configuration, which describe the layers with an indexer, and these fields:

    windowed   for each layer, whether it has a window (layer_types)
    of_window  the sizes of the layers with a window; None if there are no such layers
    """

    model_type: ClassVar[str] = "dots3_note"
    ignores_head_dim: ClassVar[bool] = True
    latent_norm_eps = property(lambda self: self.rms_norm_eps)
    checked: ClassVar[dict[str, Any]] = DeepseekV32Config.checked | {
        "apply_mla_qkv_lora_rescale": only(True),
        "attention_gate_type": only("headwise"),
        "swa_attention_gate_type": only("headwise"),
        "use_dsa": only(True),
        "use_sliding_window": only(True),
    }

    # Published files lack num_nextn_predict_layers; the checkpoints have one such layer.
    num_nextn_predict_layers: int = integer(minimum=0, maximum=16, default=1)
    first_k_dense_replace: int = computed(read_dense_layers)
    n_group: int = integer(default=1)
    topk_group: int = integer(default=1)
    rope: RopeConfig = computed(_read_rope)
    indexer_rope_interleave: bool = only(True)
    windowed: tuple[bool, ...] = computed(_read_layers)
    indexer_types: tuple[str, ...] = computed(lambda fields, known: ("full",) * known.num_hidden_layers)
    of_window: WindowConfig | None = computed(_read_window)

    def check(self, fields: Fields) -> None:
        inner = self.moe_intermediate_size
        for name in ("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"):
            fields.read(name, only(inner))
        super().check(fields)

    def check_layer_types(self, fields: Fields) -> None:
        """Do nothing: `_read_layers` checks layer_types."""


_OPTIONS = {"gate": "heads", "scale_latents": True, "norm_rope_keys": True}


def window_attention(config: Dots3NoteConfig, precision: Precision) -> WindowAttention:
    """Return the attention of a layer with a window."""
    sizes = config.of_window
    return WindowAttention(
        config.hidden_size,
        sizes.num_attention_heads,
        window=sizes.window,
        q_lora_rank=sizes.q_lora_rank,
        kv_lora_rank=sizes.kv_lora_rank,
        nope_dim=sizes.qk_nope_head_dim,
        rope_dim=sizes.qk_rope_head_dim,
        v_dim=sizes.v_head_dim,
        eps=config.latent_norm_eps,
        **_OPTIONS,
        **precision.projections(config),
    )


def decoder_block(config: Dots3NoteConfig, precision: Precision, *, windowed: bool, dense: bool) -> DecoderBlock:
    """Return a layer of the model. windowed: whether the layer has a window; dense: see `mlp`."""
    of_attention: DSAAttention
    if windowed:
        of_attention = window_attention(config, precision)
    else:
        of_attention = attention(config, precision, indexed=True, **_OPTIONS)
    return DecoderBlock(config.hidden_size, of_attention, mlp(config, precision, dense=dense), eps=config.rms_norm_eps)


class Dots3NoteModel(DeepseekV32Model):
    """`DeepseekV32Model` with layers of two kinds, each with its own rope."""

    def __init__(self, config: Dots3NoteConfig, precision: Precision) -> None:
        super().__init__(config, precision)
        self._windowed = config.windowed
        self.window_rotary = None
        if config.of_window is not None:
            self.window_rotary = make_rotary(config.qk_rope_head_dim, RopeConfig(config.of_window.rope_theta, None))

    def make_layer(self, config: Dots3NoteConfig, precision: Precision, layer: int) -> DecoderBlock:
        dense = layer < config.first_k_dense_replace
        return decoder_block(config, precision, windowed=config.windowed[layer], dense=dense)

    def layer_angles(self, positions: torch.Tensor) -> Sequence[Angles]:
        angles = self.rotary(positions)
        of_window = angles if self.window_rotary is None else self.window_rotary(positions)
        return [of_window if windowed else angles for windowed in self._windowed]


class _WithRings:
    """A mixin with the method `make_cache`, for the model and the drafter."""

    def _layers(self) -> tuple[Dots3NoteConfig, Precision, Sequence[bool]]:
        """Return (configuration, precision, whether each layer has a window)."""
        raise NotImplementedError

    def make_cache(
        self,
        num_pages: int,
        page_size: int = DeepseekV32ForCausalLM.page_size,
        device: torch.device | str = "cpu",
        *,
        state_slots: int = 64,
    ) -> WindowedKVCache:
        config, precision, windowed = self._layers()
        sizes = config.of_window
        layers = cache_layers(config, precision, ("full",) * len(windowed))
        del layers["index_layers"]  # default: all layers without a window
        return WindowedKVCache(
            window_layers=[i for i, has_window in enumerate(windowed) if has_window],
            window=1 if sizes is None else sizes.window,
            window_dim=1 if sizes is None else sizes.kv_lora_rank + sizes.qk_rope_head_dim,
            window_dtype=precision.dtype,
            num_pages=num_pages,
            page_size=page_size,
            device=device,
            state_slots=state_slots,
            **layers,
        )


class Dots3NoteForCausalLM(_WithRings, DeepseekV32ForCausalLM):
    """dots3-note without its parts for images and audio. `forward` is that of `DeepseekV32ForCausalLM`."""

    body = Dots3NoteModel
    other_parts = "vision_encoder.", "audio_encoder.", "model.vision_tower.", "model.audio_tower."

    def _layers(self) -> tuple[Dots3NoteConfig, Precision, Sequence[bool]]:
        return self.config, self.precision, self.config.windowed

    def init_buffers(self, device: torch.device | str) -> None:
        super().init_buffers(device)
        if self.model.window_rotary is not None:
            rope = RopeConfig(self.config.of_window.rope_theta, None)
            rotary = make_rotary(self.config.qk_rope_head_dim, rope)
            self.model.window_rotary.frequency_bits = rotary.frequency_bits.to(device)

    def name_of(self, stored: str) -> str:
        if stored == _MTP_EMBEDDING:
            return "drafter.embed_tokens.weight"
        return super().name_of(stored.replace("model.language_model.", "model.", 1).replace(".g_proj.", ".gate_proj."))

    def stored_name(self, name: str, mtp_layer: int = 0) -> str:
        if name == "drafter.embed_tokens.weight":
            return _MTP_EMBEDDING
        return super().stored_name(name.replace(".self_attn.gate_proj.", ".self_attn.g_proj."), mtp_layer)

    def skips(self, name: str) -> bool:
        return (self.drafter is None and name == _MTP_EMBEDDING) or super().skips(name)


_MTP_EMBEDDING = "model.mtp.embed_tokens.weight"


def _drafter_block(config: Dots3NoteConfig, precision: Precision, **_: bool) -> DecoderBlock:
    return decoder_block(config, precision, windowed=True, dense=True)


class Dots3NoteDrafter(_WithRings, DeepseekV32Drafter):
    """`DeepseekV32Drafter` with its own embedding, and a block with a window and without experts.

    Source: vLLM's and SGLang's code for dots3-note's drafter.
    """

    make_block = staticmethod(_drafter_block)

    def __init__(self, target: Dots3NoteForCausalLM) -> None:
        config, precision = target.config, target.precision
        if config.of_window is None:
            raise ValueError("drafter: needs the sizes of layers with a window, and layer_types names no such layer")
        super().__init__(target)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=precision.dtype)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(tokens)

    def angles(self, positions: torch.Tensor) -> Angles:
        return self._target[0].model.window_rotary(positions)

    def _layers(self) -> tuple[Dots3NoteConfig, Precision, Sequence[bool]]:
        (target,) = self._target
        return target.config, target.precision, (True,)


FAMILY = Family(
    Dots3NoteConfig,
    Dots3NoteForCausalLM,
    PublishedFormat(norm_dtype="BF16"),
    TinyFields(
        "dots3_note_config.json",
        {
            **TINY_CHANGES,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 4,
            "quantization_config": FP8_BLOCKS,
            "sliding_window_size": 96,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 8,
            "swa_q_lora_rank": 256,
        },
    ),
    Dots3NoteDrafter,
)
