"""Reuse of rows: records are found by tokens, planned, served, and made of what was computed exactly."""
