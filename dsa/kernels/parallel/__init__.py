"""Kernels in which each GPU of a machine writes to the memory of the other GPUs, and reads what they wrote to its own
memory."""
