"""PyTorch references of mixture-of-experts ops: gates, the sort by expert, and the sum of experts' outputs."""
