"""The indexer's two training stages: attention with the indexer's loss, and sparse attention with gradients."""

from dsa.ops._reference_only import reference_only
from reference import indexer_training as reference

indexer_warmup_attention = reference_only(reference.indexer_warmup_attention)
sparse_mla_attention = reference_only(reference.sparse_mla_attention)
