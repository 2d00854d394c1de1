"""Latent attention: dense, sparse and windowed attention, merges, and products with kv_b."""
