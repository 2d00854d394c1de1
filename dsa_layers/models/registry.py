"""The registry of model families. It imports nothing, so that a command's help can list the families without torch."""

# {model_type in config.json: the module that defines FAMILY}. A caller may add a family of another package.
FAMILIES = {
    "axk2": "dsa_layers.models.axk2",
    "deepseek_v32": "dsa_layers.models.deepseek_v32",
    "deepseek_v4": "dsa_layers.models.deepseek_v4",
    "dots3_note": "dsa_layers.models.dots3_note",
    "glm5_next": "dsa_layers.models.glm5_next",
    "glm_moe_dsa": "dsa_layers.models.glm_moe_dsa",
    "hy_v4": "dsa_layers.models.hy_v4",
    "hy_v4_vl": "dsa_layers.models.hy_v4_vl",
    "mistral_large4": "dsa_layers.models.mistral_large4",
}
# {model_type of a multimodal configuration, or of the object text_config in it: family of the text model}
TEXT_OF = {
    "dots3_note": "dots3_note",
    "dots3_note_text": "dots3_note",
    "glm5_next": "glm5_next",
    "glm5_next_text": "glm5_next",
    "hy_v4_vl": "hy_v4_vl",
    "hy_v4_vl_text": "hy_v4_vl",
    "mistral_large4": "mistral_large4",
    "mistral_large4_text": "mistral_large4",
}
