"""Models. Each model family has one file with the configuration, the decoder block and the model."""
