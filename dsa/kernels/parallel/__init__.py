"""Kernels for several GPUs of one machine. Each GPU writes its data to the memory of all GPUs, and reads only its own
memory."""
