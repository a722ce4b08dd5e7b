"""`penstock check`: every file opened to its end; what is missing, not fetched, cut short or there twice."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.media.check import Checked

HELP = (
    "open every file to its end and report what is missing, not fetched, empty, truncated, undecodable or there twice"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", nargs="+", help="files, folders, quoted globs; with --column, tables of paths"
    )
    parser.add_argument(
        "--column",
        metavar="NAME",
        action="append",
        help="SOURCE is a CSV, TSV, Parquet or JSON lines table, and this column holds paths; may be given again",
    )
    parser.add_argument(
        "--expect",
        metavar="WHAT",
        action="append",
        help="KIND=N, 'PATTERN=N', or a file with counts or a list of files and digests (JSON, TSV, sha256sum's);"
        " may be given again",
    )
    parser.add_argument("--kinds", metavar="A,B", help="only files of these kinds, such as nifti,json")
    parser.add_argument(
        "--duplicates",
        choices=("data", "all", "none"),
        default="data",
        help="what may not be there twice: all but text, all, or nothing is asked (default: data)",
    )
    parser.add_argument("--show", type=int, default=20, metavar="N", help="problems printed of each kind (default: 20)")
    group = parser.add_argument_group("running")
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="what the whole process tree may take (default: $PENSTOCK_MEMORY, else half of what is free)",
    )
    group.add_argument(
        "--workers", type=int, metavar="N", help="a ceiling; as many start as the budget holds (default: cores)"
    )
    group.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    from penstock.cli.progress import Progress
    from penstock.media.check import check

    with Progress(quiet=args.json, unit="files") as progress:
        checked = check(
            args.source,
            column=args.column,
            expect=args.expect,
            kinds=args.kinds.split(",") if args.kinds else None,
            duplicates=args.duplicates,
            memory=args.memory,
            workers=args.workers,
            watch=progress,
        )
    print(json.dumps(checked.as_json()) if args.json else report(checked, show=args.show))
    return 0 if checked.ok else 1


def report(checked: Checked, *, show: int) -> str:
    """Kinds, problems, and one line of verdict."""
    from penstock.budget import format_size

    lines = []
    if checked.kinds:
        width = max(len(kind) for kind in checked.kinds)
        lines.append(f"{'kind':<{width}}  {'files':>10}  {'bytes':>10}  {'ok':>10}  {'bad':>6}")
        for kind, one in checked.kinds.items():
            bad = f"{one.bad:,}" if one.bad else "-"
            lines.append(
                f"{kind:<{width}}  {one.files:>10,}  {format_size(one.bytes):>10}  {one.files - one.bad:>10,}  {bad:>6}"
            )
        lines.append("")
    for problem, count in checked.counts.items():
        listed = [wrong for wrong in checked.problems if wrong.problem == problem]
        lines += [
            f"{problem:<12}  {_one_line(wrong.path)}: {wrong.detail}" + (f"; {wrong.do}" if wrong.do else "")
            for wrong in listed[:show]
        ]
        if count > min(show, len(listed)):
            lines.append(f"{problem:<12}  … and {count - min(show, len(listed)):,} more (--show N, --json)")
    if checked.counts:
        lines.append("")
    if checked.relative:
        lines.append(f"{checked.relative:,} paths are relative and were taken from the folder of their table")
    for what, (asked, found) in checked.expected.items():
        if asked == found:
            lines.append(f"{what}: {found:,}, as expected")
    spent = f"in {checked.seconds:.1f} s, with {format_size(checked.memory['measured'])} of memory"
    looked_at = f"{checked.files:,} files, {format_size(checked.bytes)}"
    if checked.ok:
        lines.append(f"good: {looked_at}, read to their end {spent}")
    else:
        what = ", ".join(f"{count:,} {problem}" for problem, count in checked.counts.items())
        lines.append(
            f"NOT GOOD: {what}; {looked_at}, {spent}" if checked.files else f"NOT GOOD: {what}; no file was read"
        )
    return "\n".join(lines)


def _one_line(path: str) -> str:
    return path if path.isprintable() else ascii(path)
