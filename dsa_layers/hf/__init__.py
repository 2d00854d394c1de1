"""transformers' DeepseekV32, GlmMoeDsa and DeepseekV4 models on dsa's ops.

    from dsa_layers.hf import register
    from transformers import AutoModelForCausalLM

    register(fp8_indexer=True)  # before the model is made
    model = AutoModelForCausalLM.from_pretrained("zai-org/GLM-5.2", device_map="auto")

`accelerate(model)` does the same for a model that is there. Parameters keep their names and places, so that
checkpoints, `state_dict`, optimisers and adapters know no difference. Attention, indexer, selection and what a cache
holds are those of `dsa_layers.layers`: no mask of queries and keys is made, only lengths; `generate()` and training
work as before.
"""

from dsa_layers.hf.patching import accelerate, register, unregister

__all__ = ["accelerate", "register", "unregister"]
