"""Writing FP8 index keys into cache pages and reading them back."""

from dsa.ops._reference_only import reference_only
from reference import indexer_cache as reference

write_indexer_cache = reference_only(reference.write_indexer_cache)
read_indexer_cache = reference_only(reference.read_indexer_cache)
