"""Models on several GPUs of one node: the split of layers over ranks, and communication between ranks."""
