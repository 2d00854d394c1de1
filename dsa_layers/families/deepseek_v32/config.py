"""The configuration of DeepSeek-V3.2."""

from dsa_layers.families.fields import Fields
from dsa_layers.families.parts import read_layers
from dsa_layers.families.sparse_mla.config import SparseMLAConfig, read_sparse_mla


class DeepseekV32Config(SparseMLAConfig):
    """Every layer has an indexer, whose rope turns channels (i, i + dim / 2)."""

    model_type = "deepseek_v32"


def read_deepseek_v32(fields: Fields, generation: Fields | None) -> DeepseekV32Config:
    rope = fields.integer("qk_rope_head_dim")
    # transformers 5 means the part that rope turns, older configurations the whole head.
    fields.one_of("head_dim", (rope, fields.integer("qk_nope_head_dim") + rope), default=rope)
    # Some converters write down what this family never varies.
    fields.one_of("indexer_rope_interleave", (False,), default=False)
    return read_sparse_mla(
        DeepseekV32Config,
        fields,
        generation,
        indexer_types=("full",) * read_layers(fields),
        indexer_rope_interleave=False,
    )
