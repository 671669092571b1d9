"""The command line `attmemo`: options, progress, tables and errors. What a command does is in `attmemo.profiler`."""

from attmemo.cli.app import main

__all__ = ["main"]
