"""Fixtures of the tests of pages."""

from mmap_tools import arena, pages  # noqa: F401
