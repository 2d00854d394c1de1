"""DeepSeek-V4's compressor. The kernel is still to be written."""

from dsa.ops._reference_only import reference_only
from reference import compressed_kv

compress_kv = compressed_kv.compress_kv
write_compressed_kv = reference_only(compressed_kv.write_compressed_kv)
