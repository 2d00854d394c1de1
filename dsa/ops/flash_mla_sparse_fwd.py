"""Sparse MLA prefill: attention to selected keys of one contiguous latent array."""

from dsa.ops._reference_only import reference_only
from reference import mla_prefill as reference

flash_mla_sparse_fwd = reference_only(reference.flash_mla_sparse_fwd)
