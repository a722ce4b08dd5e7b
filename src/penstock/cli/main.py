"""`penstock`: reads the words, runs a command, and ends with 0 done, 1 failed, 2 wrong command, 3 does not fit."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType

import penstock
from penstock.errors import PenstockError

# Each is a module of this package with `HELP`, `add_arguments(parser)` and `run(args) -> int`.
COMMANDS = ("plan", "show", "count", "convert", "push", "check", "verify", "export", "run", "demo")

_INTRO = """\
Any dataset, any size, through the memory you give it.

Reads, maps, re-shards and publishes datasets far larger than RAM, under one hard memory budget, and survives being
killed: run the same command again and it finishes what is missing."""

_OUTRO = """\
examples:
  penstock convert corpus/ out/ --memory 400MB       re-shard Parquet; spliced, so nothing is decoded
  penstock convert 'logs/*.jsonl.zst' out/           JSON lines to Parquet
  penstock plan corpus/ out/ --rewrite               what that would take, before it is done
  penstock push scans.csv org/name --media t1w       a table of paths, files included, to the Hugging Face Hub
  penstock verify org/name                           every file there against the receipt that went with it
  penstock run pipeline.yaml                         a source, steps, a destination

exit codes: 0 done or already done; 1 the work failed or a check did not hold; 2 the command was wrong; 3 the plan does
not fit the budget"""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(words)
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return 2
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        return int(import_module(f"penstock.cli.{args.command}").run(args))
    except PenstockError as error:
        if getattr(args, "json", False):
            print(json.dumps({"error": type(error).__name__, "message": str(error), "exit_code": error.exit_code}))
        print(f"penstock: {error}", file=sys.stderr)
        if type(error) is PenstockError:  # not one of those we raise on purpose: a fault of ours
            print(*getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"penstock: stopped; what is committed stays, go on with: penstock {shlex.join(words)}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`penstock show … | head`); that is no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Arguments of the one command that was named are added; the others show their line of help only."""
    wide = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("penstock", description=_INTRO, epilog=_OUTRO, formatter_class=wide)
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name in COMMANDS:
        module = import_module(f"penstock.cli.{name}")
        below = commands.add_parser(name, help=module.HELP, description=module.HELP + ".", formatter_class=wide)
        module.add_arguments(below)
    return parser


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
