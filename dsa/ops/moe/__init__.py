"""Mixture of experts: router, gate, row order and the experts' sum."""
