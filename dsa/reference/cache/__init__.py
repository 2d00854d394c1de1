"""PyTorch references of the ops on paged caches: writers, readers, slot mapping and the compressor."""
