"""Several ranks on one node: starting them, their collectives, and the distribution of a pass's rows, or of a training
step's tokens, over them. `dsa_layers.engine.split` cuts the layers."""
