"""Drop-in `nn.Module`s, one idea a file."""
