"""Mixture of experts: router, gate, order of rows by expert, and the sum over experts."""
