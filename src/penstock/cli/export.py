"""`penstock export`: the files of a dataset, or the BIDS tree it was, given back."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.media.export import Progress

HELP = "give the media files of a dataset, or the whole BIDS tree it was made of, back byte for byte"

LIVE_SECONDS, PLAIN_SECONDS = 0.2, 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="a dataset on the Hub (ORG/NAME), a folder of shards, or one shard"
    )
    parser.add_argument("dest", metavar="DEST", help="a folder; files that are there already are not written again")
    parser.add_argument("--bids", action="store_true", help="the BIDS tree as it was, root files and all")
    parser.add_argument(
        "--column", metavar="NAME", action="append", help="only this column; may be given several times"
    )
    parser.add_argument("--split", metavar="NAME", help="only this split (default: all of them)")
    parser.add_argument("--config", metavar="NAME", help="this config (default: the default one)")
    parser.add_argument("--revision", metavar="REV", help="this branch, tag or commit of the dataset on the Hub")
    parser.add_argument(
        "--verify", action="store_true", help="compare what is there already by content, not by size alone"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="what it may take (default: $PENSTOCK_MEMORY, else half of what is free)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    from penstock.budget import format_size
    from penstock.media.export import export

    made = export(
        args.source,
        args.dest,
        bids=args.bids,
        columns=args.column,
        split=args.split,
        config=args.config,
        memory=args.memory,
        verify=args.verify,
        revision=args.revision,
        watch=None if args.json else _Line(),
    )
    if args.json:
        print(json.dumps({**made.as_json(), "destination": args.dest}))
        return 0
    print(f"exported to {args.dest}: {made.files:,} files, {format_size(made.bytes)}, {made.seconds:.1f} s")
    if made.written < made.files:
        print(f"{made.files - made.written:,} of them were there already")
    if made.numbered:
        print(f"{made.numbered:,} have a number in their name, since others were called the same")
    return 0


class _Line:
    """How far it is, on standard error: one live line on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last = time.monotonic()

    def __call__(self, at: Progress) -> None:
        from penstock.budget import format_size

        now = time.monotonic()
        if now - self._last < (LIVE_SECONDS if self._live else PLAIN_SECONDS):
            return
        self._last = now
        text = f"export  {format_size(at.done)} of {format_size(at.total)}  {at.files:,} files  {at.shard}"
        print(f"\r\x1b[K{text[:100]}\r" if self._live else text, end="" if self._live else "\n", file=sys.stderr)
