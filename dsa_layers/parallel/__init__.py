"""Ranks: their start on one node, their collectives, and the distribution of a pass's rows, or of a training step's
tokens, over them. `dsa_layers.engine.split` cuts the layers."""
