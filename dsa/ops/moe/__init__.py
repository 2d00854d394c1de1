"""Mixtures of experts: router, gate, sort and combination."""
