"""Models on several GPUs of one node: how layers are split, and what ranks say to each other."""
