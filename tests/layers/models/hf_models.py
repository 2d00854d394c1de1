"""Tiny random models of transformers, the reference of the parity tests. Each function saves a model in fp32 to
`directory` and returns it. changes: fields of the model's config, or of its text_config."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# index_n_heads: with few heads, all ReLUs of an index score could be 0, and top-k would depend on the order of ties.
# rms_norm_eps is not 1e-6, the eps of the latents' norms in some families, so a model with the wrong eps there fails.
_MLA = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "index_n_heads": 32, "index_head_dim": 32, "index_topk": 8,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-2, "eos_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
_NEWER = {name: value for name, value in _MLA.items() if name != "first_k_dense_replace"}  # for A.X-K2 and Hy4
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
# Changes for `glm_moe_dsa`: layers 2 and 3 attend to the keys that layer 1 selects, layer 5 to those that 4 selects.
SHARED = {"num_hidden_layers": 6, "index_topk_freq": 3, "index_skip_topk_offset": 2}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_HY_V4 = _NEWER | {
    "num_hidden_layers": 7, "qk_nope_head_dim": 24, "v_head_dim": 40, "swiglu_limit": 0.5, "hc_magnitude": 1.5,
    "bos_token_id": 0, "pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip


def deepseek_v32(directory: Path, **changes):
    fields = _MLA | {
        "num_hidden_layers": 3, "n_group": 2, "qk_nope_head_dim": 16, "v_head_dim": 16, "bos_token_id": 0,
        "rope_parameters": YARN,
    }  # fmt: skip
    return _draw_and_save("DeepseekV32", fields | changes, directory)


def glm_moe_dsa(directory: Path, **changes):
    """As in the published model, there is one routing group, rope has no YaRN, and v_head_dim > qk_nope_head_dim."""
    fields = _MLA | {
        "num_hidden_layers": 4, "n_group": 1, "qk_nope_head_dim": 24, "v_head_dim": 40, "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    return _draw_and_save("GlmMoeDsa", fields | changes, directory)


def axk2(directory: Path, **changes):
    """The model has no expert groups."""
    fields = _NEWER | {
        "num_hidden_layers": 3, "topk_group": None, "qk_nope_head_dim": 16, "v_head_dim": 24, "gated_norm_rank": 8,
        "bos_token_id": 0, "rope_parameters": YARN,
    }  # fmt: skip
    return _draw_and_save("AXK2", fields | changes, directory)


def hy_v4(directory: Path, **changes):
    """Layers 2 to 4 share the selection of layer 1, and layer 6 that of layer 5. Of the R rope channels, transformers
    rotates i with i + R / 2, and our model 2i with 2i + 1. The saved tensors have the order that our model needs."""
    model = _draw_and_save("HYV4", _HY_V4 | changes, directory)
    tensors, rope = load_file(directory / "model.safetensors"), _HY_V4["qk_rope_head_dim"]
    head = {".q_b_proj.weight": _HY_V4["qk_nope_head_dim"] + rope, ".kv_a_proj_with_mqa.weight": None}
    head |= {
        f".indexer.{name}": _HY_V4["index_head_dim"]
        for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
    }
    for name, tensor in tensors.items():
        for suffix, rows in head.items():
            if name.endswith(suffix):
                heads = tensor.unflatten(0, (-1, rows or len(tensor)))
                halves = heads[:, -rope:].unflatten(1, (2, -1))
                heads[:, -rope:] = halves.transpose(1, 2).flatten(1, 2).clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return model


def hy_v4_vl(directory: Path, **changes):
    """The model rotates channels 2i and 2i + 1, as published weights need."""
    text = {name: value for name, value in (_HY_V4 | changes).items() if name != "attn_implementation"}
    rope = text["rope_parameters"] | {"mrope_section": [4, 2, 2]}
    of_model = {"text_config": text | {"rope_parameters": rope}, "vision_config": _VISION}
    of_model["attn_implementation"] = "eager"
    return _draw_and_save("HYV4VL", of_model, directory, kind="ForConditionalGeneration")


def mistral_large4(directory: Path, **changes):
    """Layers 3 and 6 have no rope. Layer 2 attends to the keys that layer 1 selects. Layers 4 and 5 have the latents of
    layer 2, and layer 6 those of layer 3."""
    fields = {name: value for name, value in _NEWER.items() if name not in ("q_lora_rank", "attn_implementation")} | {
        "num_hidden_layers": 7, "qk_nope_head_dim": 16, "v_head_dim": 24, "bos_token_id": 0, "n_group": 1,
        "indexer_types": ["full", "full", "shared", "full", "full", "shared", "full"],
        "kv_source_layers": [0, 1, 2, 3, 2, 2, 3], "no_rope_layers": [1, 1, 1, 0, 1, 1, 0],
        "final_logit_softcapping": 3.0, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64,
            "attention_factor": 1.0,
        },
    }  # fmt: skip
    vision = _VISION | {"model_type": "pixtral", "image_size": 32, "patch_size": 16}
    of_model = {"text_config": fields | changes, "vision_config": vision, "attn_implementation": "eager"}
    return _draw_and_save("MistralLarge4", of_model, directory, kind="ForConditionalGeneration")


def dots3_note(directory: Path, **changes):
    """Layers 1 and 3 have a window."""
    fields = _NEWER | {
        "num_hidden_layers": 5, "n_group": 1, "qk_nope_head_dim": 16, "v_head_dim": 24, "bos_token_id": 0,
        "pad_token_id": None, "shared_experts_intermediate_size": 32, "head_dim": 32,
        "layer_types": [
            "indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention", "indexed_attention",
        ],
        "sliding_window": 11, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 48, "swa_head_dim": 40, "swa_qk_nope_head_dim": 24, "swa_v_head_dim": 20,
        "swa_qk_rope_head_dim": 16,
    }  # fmt: skip
    return _draw_and_save("Dots3Note", fields | changes, directory, config="Dots3NoteTextConfig")


def glm5_next(directory: Path, **changes):
    """Save a random Glm5NextForConditionalGeneration in fp32 to `directory` and return it. Layers 1 and 3 have an
    indexer. changes: fields of its text_config."""
    fields = {name: value for name, value in _NEWER.items() if name != "attn_implementation"} | {
        "num_hidden_layers": 5, "n_group": 1, "qk_rope_head_dim": 0, "qk_nope_head_dim": 16, "v_head_dim": 24,
        "layer_types": [
            "linear_attention", "indexed_attention", "linear_attention", "indexed_attention", "linear_attention",
        ],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"], "indexer_types": ["full"] * 5,
        "linear_num_heads": 3, "linear_head_dim": 16, "linear_conv_kernel_dim": 4, "index_kpool": 4,
        "index_head_dim": 64, "index_topk": 16, "swiglu_limit": 0.5, "hc_mult": 4, "pad_token_id": None,
    }  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    of_model = {"text_config": fields | changes, "vision_config": vision, "attn_implementation": "eager"}
    return _draw_and_save("Glm5Next", of_model, directory, kind="ForConditionalGeneration")


def deepseek_v4(directory: Path, *, original_format: bool = True, **changes):
    """The model has every kind of layer, and the first two layers choose experts by token id (tid2eid).
    original_format: save under the published tensor names."""
    fields = {
        "vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 5,
        "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 32, "o_groups": 2,
        "o_lora_rank": 16, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "compress_ratios": [0, 4, 128, 4, 128], "compress_rate_hca": 16, "num_hash_layers": 2, "sliding_window": 8,
        "index_n_heads": 32, "index_head_dim": 16, "index_topk": 4, "max_position_embeddings": 512, "hc_mult": 4,
        "swiglu_limit": 0.5, "rms_norm_eps": 1e-2, "bos_token_id": 0, "eos_token_id": None,
        "attn_implementation": "eager",
        "rope_parameters": {
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32, "beta_fast": 32,
            "beta_slow": 1,
        },
    }  # fmt: skip
    return _draw_and_save("DeepseekV4", fields | changes, directory, save_original_format=original_format)


def _draw_and_save(family: str, fields: dict, directory: Path, kind="ForCausalLM", config=None, **options):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config or f"{family}Config")(**fields)
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "layernorm.weight", "softmax_scaling.bias")):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
        elif name.endswith("norm.bias"):
            torch.nn.init.normal_(parameter, std=0.1)
        elif name.endswith(("sinks", "base", "scale", "position_bias", "alpha")):
            torch.nn.init.normal_(parameter, std=0.5)
        elif parameter.dim() > 1:  # the default std 0.02 gives nearly uniform logits
            torch.nn.init.normal_(parameter, std=0.08)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(buffer.shape[0], 8).argsort(-1)[:, : buffer.shape[1]])
    model.save_pretrained(directory, **options)
    return model
