"""Facts about third-party formats, pinned with their sources (README.md). No third-party code."""
