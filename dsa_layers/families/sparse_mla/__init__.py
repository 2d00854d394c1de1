"""What the families of latent attention with a lightning indexer share: DeepSeek-V3.2 and GLM-5."""
