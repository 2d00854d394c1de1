"""Norm, rotary embedding and hyper connections."""
