"""PyTorch references of the paged caches: writers, readers and the compressor."""
