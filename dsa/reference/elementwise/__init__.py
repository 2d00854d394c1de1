"""PyTorch references of norms, rotary embedding and hyper-connections."""
