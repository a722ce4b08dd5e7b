"""`penstock count`: how many rows there are."""

from __future__ import annotations

import argparse
import json

from penstock.cli import options

HELP = "count rows: from footers where they tell, else by reading"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_source(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    rows = options.dataset(args).count()
    print(json.dumps({"rows": rows}) if args.json else f"{rows:,}")
    return 0
