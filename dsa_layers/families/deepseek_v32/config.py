"""The configuration of DeepSeek-V3.2."""

from dsa_layers.families.declared import one_of
from dsa_layers.families.fields import Fields
from dsa_layers.families.sparse_mla.config import SparseMLAConfig


class DeepseekV32Config(SparseMLAConfig):
    """Every layer has an indexer, whose rope turns channels (i, i + dim / 2)."""

    model_type = "deepseek_v32"

    def check(self, fields: Fields) -> None:
        super().check(fields)
        # transformers 5 means the part that rope turns, older configurations the whole head.
        rope, nope = self.qk_rope_head_dim, self.qk_nope_head_dim
        fields.read("head_dim", one_of(rope, nope + rope, default=None))
