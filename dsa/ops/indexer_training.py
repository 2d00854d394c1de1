"""The indexer's two training stages: attention with the indexer's loss, and the loss over selected keys."""

from dsa.ops._reference_only import reference_only
from reference import indexer_training as reference

sparse_indexer_loss = reference_only(reference.sparse_indexer_loss)
