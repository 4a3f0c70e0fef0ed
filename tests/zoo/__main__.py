"""Run the zoo: ``python -m tests.zoo [--only PATTERN] [--variants 3,nvme] [--report FILE]``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.multi.pool import preload
from tests.zoo.case import VARIANTS
from tests.zoo.catalog import modules, select
from tests.zoo.comparison import MODULE, Comparison, Outcome
from tests.zoo.report import table


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", default="*", help="part of a name, or a pattern with *")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--report", type=Path, help="write the table to this file, too")
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th case, from the i-th")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks of failures")
    return parser.parse_args()


def main() -> int:
    """Run the selected cases and return the exit status."""
    options = arguments()
    variants = options.variants.split(",")
    unknown = set(variants) - set(VARIANTS)
    if unknown:
        raise SystemExit(f"--variants: expected some of {', '.join(VARIANTS)}, got {', '.join(unknown)}.")
    first, _, number = options.shard.partition("/")
    cases = select(options.only)[int(first) - 1 :: int(number)]
    if not cases:
        raise SystemExit(f"--only: expected part of a case's name, got '{options.only}'.")
    # A restart after a crash does not import them again.
    preload(MODULE, *modules(options.only))
    comparison = Comparison()
    outcomes: list[Outcome] = []
    began = time.monotonic()
    try:
        for case in cases:
            for variant in (each for each in variants if each in case.variants):
                outcome = comparison.outcome(case, variant)
                outcomes.append(outcome)
                verdict = outcome.kind if outcome.passed else outcome.kind.upper()
                print(
                    f"{verdict:8} {case.name} [{variant}] {outcome.summary} ({outcome.seconds:.2f} s)",
                    file=sys.stderr,
                    flush=True,
                )
                if options.verbose and not outcome.passed:
                    print(outcome.tail, file=sys.stderr, flush=True)
    finally:
        comparison.close()
    text = table(outcomes, time.monotonic() - began)
    print(text)
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(text + "\n")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
