"""GLM-5, 5.1 and 5.2, as the registry finds it."""

from dsa_layers.families.family import Family
from dsa_layers.families.glm_moe_dsa.config import GlmMoeDsaConfig
from dsa_layers.families.glm_moe_dsa.model import GlmMoeDsaForCausalLM
from dsa_layers.families.glm_moe_dsa.tiny import TINY
from dsa_layers.families.manifest import PublishedFormat
from dsa_layers.families.sparse_mla.drafter import SparseMLADrafter

_FORMAT = PublishedFormat(norm_dtype="BF16")
FAMILY = Family(GlmMoeDsaConfig, GlmMoeDsaForCausalLM, _FORMAT, TINY, SparseMLADrafter)
