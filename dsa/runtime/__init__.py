"""What every kernel needs on the host: compilation, and its cache on disk."""
