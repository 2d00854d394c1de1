"""CuTe DSL kernels of the paged caches: writers, readers and the compressor."""
