"""The configuration that families of latent attention with a lightning indexer and mixture-of-experts MLPs share."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from dsa_layers.families.declared import computed, integer, one_of, only
from dsa_layers.families.fields import Fields
from dsa_layers.families.model import ModelConfig
from dsa_layers.families.parts import RopeConfig, read_rope, share_of_heads


@dataclass(frozen=True)
class SparseMLAConfig(ModelConfig):
    """The fields of these families in addition to the common ones.

    indexer_types: per layer, "full" (has an indexer) or "shared" (has none, and attends to what the last full layer
    before it selected).
    indexer_rope_interleave: whether rope turns channels (2i, 2i + 1) of index queries and keys, or (i, i + dim / 2).
    index_share_for_mtp_iteration: whether further steps of a drafter attend to what its first step selected.
    latent_norm_eps: of q_a_layernorm and kv_a_layernorm; rms_norm_eps is that of all other RMSNorms.
    """

    # transformers and DeepSeek's inference code build q_a_layernorm and kv_a_layernorm with this eps, whatever
    # rms_norm_eps says. GLM-5 publishes an rms_norm_eps of 1e-5. Engines that use it for the latents, too, get latents
    # that are smaller by a factor of 4.5e-6 / (mean square before the norm). bf16 hides this above a mean square of
    # 0.003.
    latent_norm_eps: ClassVar[float] = 1e-6
    fp8_cache_sizes: ClassVar[dict[str, int]] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    checked: ClassVar[dict[str, Any]] = ModelConfig.checked | {
        "ep_size": only(1),
        "moe_layer_freq": only(1),
        "rope_interleave": only(True),  # of attention, which some configurations write down
        "scoring_func": only("sigmoid"),
    }

    intermediate_size: int = integer()
    first_k_dense_replace: int = integer(minimum=0)
    n_group: int = integer()
    topk_group: int = integer()
    norm_topk_prob: bool = one_of(True, False)
    kv_lora_rank: int = integer()
    qk_nope_head_dim: int = integer()
    qk_rope_head_dim: int = integer()
    v_head_dim: int = integer()
    rope: RopeConfig = computed(read_rope)
    indexer_types: tuple[str, ...] = computed(lambda fields, known: ("full",) * known.num_hidden_layers)
    indexer_rope_interleave: bool = only(False)
    index_share_for_mtp_iteration: bool = only(False)

    def fp8_widths(self) -> dict[str, int]:
        names = ["hidden_size", "q_lora_rank", "kv_lora_rank"]
        names += ["intermediate_size"] if self.first_k_dense_replace else []
        names += ["moe_intermediate_size"] if self.first_k_dense_replace < self.num_hidden_layers else []
        widths = {name: getattr(self, name) for name in names}
        return widths | {"v_head_dim": self.num_attention_heads * self.v_head_dim}

    def with_heads(self, heads: int) -> Self:
        return replace(self, num_attention_heads=share_of_heads(heads, self.num_attention_heads))

    def check(self, fields: Fields) -> None:
        rope, layers, dense = self.qk_rope_head_dim, self.num_hidden_layers, self.first_k_dense_replace
        fields.read("num_key_value_heads", only(self.num_attention_heads))
        fields.read("qk_head_dim", only(self.qk_nope_head_dim + rope))
        fields.require(rope % 2 == 0, "qk_rope_head_dim", "an even number")
        accepted = f"at least qk_rope_head_dim={rope}: rope turns the indexer's first channels"
        fields.require(rope <= self.index_head_dim, "index_head_dim", accepted)
        fields.require(dense <= layers, "first_k_dense_replace", f"at most num_hidden_layers={layers}")
        fields.read("mlp_layer_types", only(["dense"] * dense + ["sparse"] * (layers - dense)))
        # The first name is transformers' up to 5.17.
        names = "indexed_attention", "deepseek_sparse_attention"
        fields.read("layer_types", one_of(*([name] * layers for name in names), default=None))

        groups, chosen = self.n_group, self.topk_group
        fields.require(self.n_routed_experts % groups == 0, "n_routed_experts", f"a multiple of n_group={groups}")
        of_group = self.n_routed_experts // groups
        accepted = "groups of 2 experts or more: the gate ranks a group by its best 2"
        fields.require(of_group >= 2, "n_group", accepted)
        fields.require(chosen <= groups, "topk_group", f"at most n_group={groups}")
        accepted = f"at most {chosen * of_group}, the experts of topk_group={chosen} groups"
        fields.require(self.num_experts_per_tok <= chosen * of_group, "num_experts_per_tok", accepted)
