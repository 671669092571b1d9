"""One forward of a memoized model: hooks, what is read of its arguments, how it is planned and counted."""
