"""Fixtures of the tests of packed blocks."""

from packed_tools import _both  # noqa: F401
