"""What stands at ``model.attmemo`` for packed blocks and rows, and what `memoize` checks before."""
