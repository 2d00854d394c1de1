"""The paged caches: writers, readers and the compressor."""
