"""PyTorch references of the indexer's training: the warm-up stage, the sparse stage, and the gradients of both."""
