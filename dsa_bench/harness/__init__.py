"""Modules that all benchmarks share. They define cases, print and plot the results, profile an op, measure host times,
and tune configurations."""
