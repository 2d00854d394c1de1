"""CuTe DSL kernels for training: the indexer's warm-up and sparse stages, and the gradients of sparse MLA attention."""
