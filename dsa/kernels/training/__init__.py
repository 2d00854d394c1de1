"""CuTe DSL kernels that train the indexer: the warm-up stage, the sparse stage and their gradients."""
