"""CuTe DSL kernels of multi-head latent attention: dense, sparse, sliding windows, merges."""
