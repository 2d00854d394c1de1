"""Facts about third-party formats, pinned with their sources (vendored/README.md). No third-party code."""
