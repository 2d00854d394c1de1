"""The registry of model families. It imports nothing, so that a command's help can list the families."""

# {model_type in config.json: the module that defines FAMILY}. A caller may add a family of another package.
FAMILIES = {
    "axk2": "dsa_layers.models.axk2",
    "deepseek_v32": "dsa_layers.models.deepseek_v32",
    "deepseek_v4": "dsa_layers.models.deepseek_v4",
    "glm_moe_dsa": "dsa_layers.models.glm_moe_dsa",
    "hy_v4": "dsa_layers.models.hy_v4",
}
