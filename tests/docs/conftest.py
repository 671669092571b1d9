"""Fixtures of the tests that run what pages show."""

from page_inputs import folder, models  # noqa: F401
