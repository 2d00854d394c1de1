"""Training of indexers."""
