"""The embedder that turns hidden states into search keys, its training and its calibration."""
