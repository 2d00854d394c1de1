"""DeepSeek-V4, as the registry finds it."""

from dsa_layers.families.deepseek_v4.config import DeepseekV4Config
from dsa_layers.families.deepseek_v4.drafter import DeepseekV4Drafter
from dsa_layers.families.deepseek_v4.model import DeepseekV4ForCausalLM
from dsa_layers.families.deepseek_v4.tiny import TINY
from dsa_layers.families.family import Family
from dsa_layers.families.manifest import PublishedFormat

_FORMAT = PublishedFormat(norm_dtype="BF16", e8m0_scales=True)
FAMILY = Family(DeepseekV4Config, DeepseekV4ForCausalLM, _FORMAT, TINY, DeepseekV4Drafter)
