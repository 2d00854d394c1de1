"""Small stacks for a CPU. They have the published models' fields with small sizes, and can be split over two ranks."""

from dsa_bench.e2e.stacks import stack
from dsa_layers.models.protocols import CheckpointModel

SMALL = {"hidden_size": 256, "moe_intermediate_size": 256, "n_routed_experts": 8, "vocab_size": 512}
SMALL |= {"num_experts_per_tok": 2, "q_lora_rank": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 256}
FEWER = {
    "V3.2": HEADS | {"n_group": 2, "topk_group": 1},
    "V4-Flash": {"num_attention_heads": 8, "o_groups": 2, "o_lora_rank": 128},
    "GLM-5": HEADS | {"eos_token_id": 1, "pad_token_id": 0},
    "GLM-5.2": HEADS | {"eos_token_id": 1, "pad_token_id": 0},
}


def small_stack(name: str, device: str = "cpu", **options) -> CheckpointModel:
    return stack(name, device, **SMALL | FEWER[name] | options)


def make_small(stacks: dict, **fields) -> None:
    """Set small sizes in all entries of `stacks` (STACKS or LONG_STACKS). fields: further fields to set."""
    for name, (file, published) in stacks.items():
        stacks[name] = (file, published | SMALL | FEWER[name] | fields)
