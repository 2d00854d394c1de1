"""Model families: of each its configuration, model, tensors and tiny checkpoint, in a folder of its own."""
