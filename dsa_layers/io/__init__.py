"""Load, save and convert a checkpoint's directory: weights, configuration, tokenizer and chat format. gpu_plan.py: the
GPU memory that a model needs.

The loader checks the headers of all files before it reads the first weight. A checkpoint has hundreds of gigabytes, so
a truncated file must not surface minutes into the load. The loader assigns all tensors to the model in one step at the
end. A load that fails therefore leaves the model unchanged.
"""
