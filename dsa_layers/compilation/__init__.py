"""The kernels that a model runs on, compiled before it runs."""
