"""`penstock verify`: a folder or a published dataset against the receipt that came with it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.publish.verify import Verified

HELP = "compare every file of a folder or a published dataset with its receipt, and read samples back"
SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="DEST|ORG/NAME", help="a folder Penstock wrote, a dataset on the Hub, or s3://…"
    )
    parser.add_argument("--revision", metavar="R", help="a branch, tag or commit of a dataset on the Hub")
    parser.add_argument(
        "--sample", type=int, default=8, metavar="N", help="read back parts of this many shards (default: 8)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="which shards are picked (default: 0)")
    parser.add_argument("--full", action="store_true", help="download and hash every file, not only samples")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    from penstock.cli.progress import Progress
    from penstock.publish.verify import verify

    with Progress(quiet=args.json, unit="files") as progress:
        verified = verify(
            args.target,
            revision=args.revision,
            sample=args.sample,
            seed=args.seed,
            full=args.full,
            watch=progress,
        )
    print(json.dumps(verified.as_json()) if args.json else report(verified))
    return 0 if verified.ok else 1


def report(verified: Verified) -> str:
    """What is wrong, and one line of verdict."""
    from penstock.budget import counted, format_size

    lines = [f"{one.problem:<10}  {one.path}: {one.detail}" for one in verified.problems[:SHOWN]]
    if len(verified.problems) > SHOWN:
        lines.append(f"… and {len(verified.problems) - SHOWN:,} more (--json lists all)")
    if verified.unlisted:
        lines.append(f"nothing is said of {counted(verified.unlisted, 'file')} of splits that have no receipt")
    at = f" at {verified.revision[:10]}" if verified.revision else ""
    what = (
        f"{verified.target}{at}: {counted(verified.files, 'file')}, {format_size(verified.bytes)},"
        f" {counted(verified.rows, 'row')}; sizes and SHA-256 compared, {counted(verified.samples, 'shard')} read back;"
        f" {format_size(verified.read)} read in"
        f" {verified.seconds:.1f} s"
    )
    verdict = "good" if verified.ok else f"NOT GOOD: {counted(len(verified.problems), 'problem')}"
    return "\n".join([*lines, f"{verdict}: {what}"])
