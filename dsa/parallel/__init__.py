"""Sums and messages between the GPUs of one machine: launches of `dsa.kernels.parallel`, copies from GPU to GPU, and
the memory that GPUs share. `import dsa` does not import this package."""
