"""Modules that all benchmarks share: cases, tables and plots of rows, profiles, and the tuner."""
