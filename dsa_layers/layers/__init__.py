"""Drop-in `nn.Module` layers, one kind of layer per file."""
