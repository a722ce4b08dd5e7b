"""Runs one case of the table in this process: `job.py CASE SAMPLES DEST MEMORY WORKERS`. Made to be killed."""

from __future__ import annotations

import sys
from pathlib import Path

from table import CASES

from penstock.errors import PenstockError


def main(name: str, samples: str, dest: str, memory: str, workers: str) -> int:
    case = CASES[name]
    try:
        receipt = case.make(Path(samples)).write(dest, memory=memory, workers=int(workers), **case.write)
    except PenstockError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    sys.stdout.write("already done\n" if receipt.already_done else "done\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
