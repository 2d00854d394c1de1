"""Multi-head latent attention, dense and sparse, its windows and merges."""
