"""Models. The module of a model family has the configuration, the model, and FAMILY, the family's `Family`."""
