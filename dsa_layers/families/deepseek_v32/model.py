"""DeepSeek-V3.2."""

from dsa_layers.families.sparse_mla.model import SparseMLAForCausalLM


class DeepseekV32ForCausalLM(SparseMLAForCausalLM):
    """DeepSeek-V3.2 of a DeepseekV32Config: every layer has an indexer. forward: as SparseMLAForCausalLM.

    Source: DeepSeek-V3.2's inference code and report.
    """
