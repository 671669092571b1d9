"""``python -m attmemo.cli`` is `attmemo`."""

from attmemo.cli.app import main

main()
