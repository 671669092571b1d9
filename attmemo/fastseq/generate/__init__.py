"""`generate` of a transformers model, faster, with the same tokens."""
