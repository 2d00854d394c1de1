"""Models. Each model family has a module with its configuration, its model and its `Family`, named FAMILY."""
