"""From a file of texts to a file of generated lines: tokenize, plan batches, generate, decode, write, resume."""
