"""Text generation: requests, passes of a model over a cache, and sampling."""
