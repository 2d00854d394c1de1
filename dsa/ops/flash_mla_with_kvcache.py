"""MLA decoding over a paged cache, dense or over selected keys, and its plan."""

from dsa.ops._reference_only import reference_only
from reference import mla_decode, mla_metadata

get_mla_metadata = reference_only(mla_metadata.get_mla_metadata)
flash_mla_with_kvcache = reference_only(mla_decode.flash_mla_with_kvcache)
