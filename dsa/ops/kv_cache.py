"""Writing latents into cache pages and reading them back."""

from dsa.ops._reference_only import reference_only
from reference import kv_cache as reference

write_kv_cache = reference_only(reference.write_kv_cache)
read_kv_cache = reference_only(reference.read_kv_cache)
make_v4_cache = reference.make_v4_cache
