"""Run transformers' DeepseekV32, GlmMoeDsa and DeepseekV4 models with dsa's ops.

    from dsa_layers.hf import accelerate
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("zai-org/GLM-5.2", device_map="auto")
    accelerate(model, fp8_indexer=True)

Parameters keep their names, so checkpoints, `state_dict`, optimisers and adapters work as before. `generate()` and
training work as before too. Attention and indexers run the code of `dsa_layers.layers` in passes with gradients, and
the code of `dsa_layers.engine` in other passes. They use the lengths of sequences instead of an attention mask.
"""

from dsa_layers.hf.patching import accelerate

__all__ = ["accelerate"]
