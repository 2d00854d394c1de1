"""`nn.Module` layers, one kind of layer per file, and the attention in indexer training (trained_attention.py)."""
