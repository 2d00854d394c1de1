"""transformers' DeepseekV32, GlmMoeDsa and DeepseekV4 models on dsa's ops.

    from dsa_layers.hf import accelerate
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("zai-org/GLM-5.2", device_map="auto")
    accelerate(model, fp8_indexer=True)

Parameters keep their names, so checkpoints, `state_dict`, optimisers and adapters work as before. Attention, indexer,
selection and cache are those of `dsa_layers.layers`. `generate()` and training work as before. No mask of queries and
keys is made, only lengths.
"""

from dsa_layers.hf.patching import accelerate

__all__ = ["accelerate"]
