"""PyTorch references of norms, rope and hyper connections."""
