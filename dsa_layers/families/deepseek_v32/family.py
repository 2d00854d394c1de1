"""DeepSeek-V3.2, as the registry finds it."""

from dsa_layers.families.deepseek_v32.config import DeepseekV32Config
from dsa_layers.families.deepseek_v32.model import DeepseekV32ForCausalLM
from dsa_layers.families.deepseek_v32.tiny import TINY
from dsa_layers.families.family import Family
from dsa_layers.families.manifest import PublishedFormat
from dsa_layers.families.sparse_mla.drafter import SparseMLADrafter

_FORMAT = PublishedFormat(norm_dtype="F32", mtp_embedding="embed_tokens.weight", mtp_head="shared_head.head.weight")
FAMILY = Family(DeepseekV32Config, DeepseekV32ForCausalLM, _FORMAT, TINY, SparseMLADrafter)
