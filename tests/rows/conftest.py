"""Fixtures of the tests of rows."""

from rows_tools import _both, _case, _path  # noqa: F401
