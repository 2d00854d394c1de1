"""Kernels for several GPUs of one machine. Each GPU writes to the memory of the other GPUs, and reads only its own
memory."""
