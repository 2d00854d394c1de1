"""PyTorch references of norm, rotary embedding and hyper connections."""
