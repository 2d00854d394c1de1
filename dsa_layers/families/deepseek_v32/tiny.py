"""The tiny DeepSeek-V3.2: a dense layer and three sparse ones."""

from dsa_layers.families.family import TinyFields
from dsa_layers.families.sparse_mla.tiny import SPARSE_MLA_FIELDS

TINY = TinyFields(
    "deepseek_v32_config.json", {**SPARSE_MLA_FIELDS, "n_group": 2, "num_hidden_layers": 4, "topk_group": 1}
)
