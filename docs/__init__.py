"""The documents, and what makes pages and pictures of them."""
