"""CuTe DSL kernels of multi-head latent attention: dense, sparse, varlen, window indices, merges, FP8 products with
kv_b.
"""
