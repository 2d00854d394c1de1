"""A tiny GLM-5 of transformers, with random weights, on dsa's layers: the same tokens as eager attention gives.

usage: python examples/glm_in_transformers.py        (with the extra `transformers`)
"""

import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from dsa_layers.hf import accelerate

SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
    "index_topk": 16,
    "eos_token_id": None,
}


def main() -> None:
    torch.manual_seed(0)
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**SIZES)).eval()
    prompts = torch.randint(SIZES["vocab_size"], (2, 40))
    mask = torch.ones_like(prompts)
    mask[1, :25] = 0  # the second prompt has 15 tokens

    eager = model.generate(prompts, attention_mask=mask, max_new_tokens=8, do_sample=False)
    accelerate(model)  # in place: the classes of attention, indexers and norms change, parameters stay
    ours = model.generate(prompts, attention_mask=mask, max_new_tokens=8, do_sample=False)
    print("eager:", eager[:, 40:].tolist())
    print("dsa:  ", ours[:, 40:].tolist())
    assert torch.equal(eager, ours)

    model.train()
    loss = model(prompts, labels=prompts).loss  # gradients reach all parameters but the indexers'
    loss.backward()
    print(f"loss {loss.item():.3f}, gradient of o_proj {model.model.layers[0].self_attn.o_proj.weight.grad.norm():.3g}")


if __name__ == "__main__":
    main()
