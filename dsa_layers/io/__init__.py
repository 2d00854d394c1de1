"""Load, save and convert checkpoints; read tokenizers and chat templates; plan GPU memory (gpu_plan.py).

The loader checks the headers of all files before it reads the first weight, because reading can take minutes. It
assigns all tensors to the model in one step at the end, so a load that fails leaves the model unchanged.
"""
