"""Fixtures of the tests of commands."""

from cli_tools import database, logs, trained  # noqa: F401
