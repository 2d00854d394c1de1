"""Ops bridges of mixtures of experts: gate, sort and combination."""
