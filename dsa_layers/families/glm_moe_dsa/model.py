"""GLM-5, 5.1 and 5.2."""

from dsa_layers.families.sparse_mla.model import SparseMLAForCausalLM


class GlmMoeDsaForCausalLM(SparseMLAForCausalLM):
    """GLM-5 of a GlmMoeDsaConfig. forward: as SparseMLAForCausalLM.

    DeepSeek-V3.2 with other sizes (heads of 192 + 64 and values of 256, 32 index heads), plain rope, one routing group,
    and rope on pairs (2i, 2i + 1) in the indexer too. In GLM-5.2 (IndexShare) only some layers have an indexer and an
    index cache: with S_t^l the keys that token t attends to in layer l, S_t^l = S_t^(l-1) where a layer has none.
    Source: GLM-5's report (arXiv 2602.15763), IndexShare (arXiv 2603.12201), and `GlmMoeDsa` of transformers 5.
    """
