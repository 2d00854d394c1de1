"""Models: one file a family, with its configuration, its block and its model."""
