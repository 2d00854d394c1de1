"""Reading config.json: each field by its name, with the values that it may have."""
