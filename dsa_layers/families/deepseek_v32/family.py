"""DeepSeek-V3.2, as the registry finds it."""

from dsa_layers.families.deepseek_v32.config import read_deepseek_v32
from dsa_layers.families.deepseek_v32.manifest import deepseek_v32_tensor_manifest
from dsa_layers.families.deepseek_v32.model import DeepseekV32ForCausalLM
from dsa_layers.families.deepseek_v32.tiny import TINY
from dsa_layers.families.family import Family
from dsa_layers.families.sparse_mla.drafter import SparseMLADrafter

FAMILY = Family(read_deepseek_v32, DeepseekV32ForCausalLM, deepseek_v32_tensor_manifest, TINY, SparseMLADrafter)
