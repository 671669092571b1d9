"""Fixtures of the tests of `memoize`."""

from handle_tools import exact, flat_database, inputs, loaded, model  # noqa: F401
