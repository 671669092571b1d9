"""Measure the figures and tables of the papers again, and write docs/paper.md.

    python scripts/paper ../shared docs/paper               # every figure that has no JSON there yet: under 3 hours
    python scripts/paper ../shared docs/paper fig03 table6  # these, again
    python scripts/paper ../shared docs/paper --page        # the page and its plots, from the JSONs
    python scripts/paper ../shared results --toy            # a smoke test: sizes that show nothing

Databases that several figures use, and parts of figures that were measured, are kept in --work and are made once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this package, and the scripts beside it
from measured_at import write_record

from paper import page
from paper.frame import LaterError, Run, measured
from paper.registry import NAMES, figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path, help="folder with data/ and models/")
    parser.add_argument("output", type=Path, help="folder of the JSONs and plots")
    parser.add_argument("figures", nargs="*", help=f"of {', '.join(NAMES)}; default: those without a JSON")
    parser.add_argument("--page", action="store_true", help="write the page beside the folder; alone: measure nothing")
    parser.add_argument("--toy", action="store_true", help="tiny sizes")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "attmemo-paper", help="databases")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no part of a figure after these")
    args = parser.parse_intermixed_args()
    if unknown := set(args.figures) - set(NAMES):
        parser.error(f"no such figure: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    args.output.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    absent = [] if args.page else [name for name in NAMES if not (args.output / f"{name}.json").is_file()]
    run = Run(args.shared, args.work, args.toy, time.monotonic() + args.seconds)
    for name in args.figures or absent:
        run.tell(name)
        try:
            found = measured(figure(name), run)
        except LaterError as part:
            sys.exit(f"{name} is not finished: {part} is next; run the same command again")
        write_record(args.output / f"{name}.json", found)
        run.tell(f"{name}: {found['seconds']:g} s")
    if args.page:
        print(page.write(args.output))


if __name__ == "__main__":
    main()
