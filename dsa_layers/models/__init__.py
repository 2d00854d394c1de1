"""Whole models, and how they are loaded."""
