"""`penstock convert`: any format to any format, re-sharded."""

from __future__ import annotations

import argparse

from penstock.cli import options

HELP = "write a dataset again, re-sharded or in another format; Parquet to Parquet is spliced"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_source(parser)
    parser.add_argument("dest", metavar="DEST", help="a new or empty folder, or one where this same command was begun")
    options.add_writing(parser)
    options.add_running(parser)


def run(args: argparse.Namespace) -> int:
    from penstock.cli.progress import Progress
    from penstock.cli.report import report

    with Progress(quiet=args.json) as progress:
        receipt = options.dataset(args).write(args.dest, watch=progress, **options.write_arguments(args))
    report(receipt, args.dest, as_json=args.json)
    return 0
