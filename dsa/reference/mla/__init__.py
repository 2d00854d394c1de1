"""PyTorch references of multi-head latent attention: dense, sparse, over sliding windows, and the merge of branches."""
