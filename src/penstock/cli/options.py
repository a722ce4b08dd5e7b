"""Options that commands share, and what they mean to a `Dataset`."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.dataset import Dataset


def add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="+",
        help="a file, a quoted glob, a folder; several are read one after the other",
    )
    add_reading(parser)


def add_reading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reading")
    group.add_argument("--input-format", metavar="F", help="parquet or jsonl, where the files' endings do not tell")
    group.add_argument("--columns", metavar="A,B", help="read these columns only")
    group.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="a malformed row stops the run, or is left out and counted",
    )
    group.add_argument(
        "--infer",
        choices=("full", "sample"),
        default="full",
        help="types of a text source from all of it, or from its first few MiB",
    )


def add_writing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("writing")
    group.add_argument("--format", default="parquet", help="parquet, jsonl, jsonl.gz or jsonl.zst (default: parquet)")
    group.add_argument(
        "--max-shard-size", default="500MB", metavar="SIZE", help="Arrow bytes a shard holds at most (default: 500MB)"
    )
    group.add_argument("--rewrite", action="store_true", help="decode and encode even where Parquet could be spliced")


def add_running(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("running")
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="what the whole process tree may take (default: $PENSTOCK_MEMORY, else half of what is free)",
    )
    group.add_argument(
        "--workers", type=int, metavar="N", help="a ceiling; as many start as the budget holds (default: cores)"
    )
    group.add_argument("--disk", metavar="SIZE", help="what scratch and staged shards may take together")
    group.add_argument(
        "--scratch", metavar="DIR", help="where work in hand lies (default: DEST/.penstock, or $PENSTOCK_SCRATCH)"
    )
    group.add_argument("--engine", choices=("local",), default="local", help="where tasks run")
    group.add_argument("--restart", action="store_true", help="discard what was done here before")
    group.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def dataset(args: argparse.Namespace) -> Dataset:
    """The dataset a command's source words mean."""
    import penstock

    return penstock.read(
        args.source if len(args.source) > 1 else args.source[0],
        format=args.input_format,
        columns=args.columns.split(",") if args.columns else None,
        on_error=args.on_error,
        infer=args.infer,
    )


def write_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What of a command's words `Dataset.write` takes."""
    return {
        "memory": args.memory,
        "disk": args.disk,
        "max_shard_size": args.max_shard_size,
        "format": args.format,
        "rewrite": args.rewrite,
        "workers": args.workers,
        "scratch": args.scratch,
        "engine": args.engine,
        "restart": args.restart,
        "command": command_line(),
    }


def command_line() -> str:
    """The command as it could be typed again, with no path of this machine before its name."""
    return shlex.join(["penstock", *sys.argv[1:]])
