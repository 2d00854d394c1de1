"""Caches of earlier tokens: pages of latents, index keys and compressed entries, window rings, compressor states."""
