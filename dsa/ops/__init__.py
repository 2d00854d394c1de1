"""The ops, one module each: check the arguments, choose the backend, allocate, launch."""
