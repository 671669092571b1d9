"""The guard: which answers may come from a record, which are verified, and what was learned from it."""
