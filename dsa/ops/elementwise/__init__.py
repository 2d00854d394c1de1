"""Ops bridges of norm, rotary embedding and hyper connections."""
