"""Fixtures of the tests of pipelines."""

from pipeline_tools import models, no_thread_is_left  # noqa: F401
