"""The parser of config.json, which checks the value of each field."""
