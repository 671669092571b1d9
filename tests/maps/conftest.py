"""Fixtures of the tests of maps."""

from maps_tools import case  # noqa: F401
