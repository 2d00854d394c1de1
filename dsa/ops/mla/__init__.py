"""Latent attention: dense, sparse and sliding-window attention, merging of results, and products with kv_b."""
