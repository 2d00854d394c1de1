"""CuTe DSL kernels of multi-head latent attention: dense, sparse, varlen, window indices, merges, products with kv_b."""
