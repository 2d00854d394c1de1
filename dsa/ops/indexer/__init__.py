"""The lightning indexer: scores, top-k selection and their inputs."""
