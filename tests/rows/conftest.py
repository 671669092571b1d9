"""Fixtures of the tests of rows."""

from pools import folder  # noqa: F401
from rows_tools import _both, _case, _path  # noqa: F401
