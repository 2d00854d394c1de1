"""`nn.Module` layers, and the attention in indexer training (trained_attention.py)."""
