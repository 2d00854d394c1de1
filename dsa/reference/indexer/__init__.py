"""PyTorch references of the lightning indexer: scores, top-k selection and their inputs."""
