"""Self-checks of `memoize`: a small batch goes through the very path that serves. One file for each kind of reuse."""
