"""What a model keeps of earlier tokens: pages of latents, keys and entries, rings of windows, states."""
