"""PyTorch references of mixtures of experts: gate, sort and combination."""
