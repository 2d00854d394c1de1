"""Paged caches: writers, readers, slots and the compressor."""
