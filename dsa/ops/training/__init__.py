"""The indexer's training: warm-up, sparse stage and their gradients."""
