"""Fixtures of the tests of databases."""

from db_tools import copy, whole  # noqa: F401
from pools import folder, patient  # noqa: F401
