"""Paged caches: writers and readers of cache pages, the mapping of tokens to slots, and the compressor."""
