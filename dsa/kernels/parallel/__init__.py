"""Kernels in which GPUs of one machine read what others have written to their memory."""
