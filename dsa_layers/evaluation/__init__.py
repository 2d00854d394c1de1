"""What sparse attention costs and what it saves: loss on held-out text, and the keys that tokens read."""
