"""Ranks: their start on one node, their collectives, and the distribution of a pass's rows or a training step's tokens
over ranks. `dsa_layers.engine.split` cuts the layers."""
