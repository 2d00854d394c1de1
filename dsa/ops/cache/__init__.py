"""Paged caches: ops that write and read them, the mapping of tokens to slots, and the compressor."""
