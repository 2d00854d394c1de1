"""What a checkpoint's directory holds: weights, configuration, tokenizer and chat format; to load, save and convert.

Everything that can be wrong is looked for in the files' headers before the first weight is read: a checkpoint is
hundreds of gigabytes, and minutes into the load is too late to learn that a file is cut short. The model gets its
tensors in one step at the end, so a load that fails leaves it as it was.
"""
