"""Reuse of equal prefixes across requests, exactly: causal models."""
