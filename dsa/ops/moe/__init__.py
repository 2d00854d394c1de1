"""Ops bridges of mixtures of experts: router, gate, sort and combination."""
