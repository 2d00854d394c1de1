"""Models. Each family's module has its configuration, its model, and FAMILY, an instance of `Family`."""
