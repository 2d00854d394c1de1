"""Shared by the benchmarks: cases, tables and plots of rows, profiles, and the tuner."""
