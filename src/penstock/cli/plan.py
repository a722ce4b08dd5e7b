"""`penstock plan`: what a `convert` or a pipeline would do and take, before it is done."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from penstock.cli import options
from penstock.errors import UsageError

HELP = "say what a conversion or a pipeline.yaml would do, and the memory, disk and shards it would take"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="what would be read, or a pipeline.yaml")
    parser.add_argument("more", metavar="DEST", nargs="*", help="where it would be written; before it, more sources")
    options.add_reading(parser)
    options.add_writing(parser)
    options.add_running(parser)


def run(args: argparse.Namespace) -> int:
    from penstock.budget import resolve_budget
    from penstock.dataset import worker_count, write_options
    from penstock.explain import explain

    if args.source.endswith((".yaml", ".yml")):
        from penstock.pipeline import load

        pipeline = load(Path(args.source))
        if pipeline.pushes:
            raise UsageError("plans what is written", where=args.source, do="use `penstock push --dry-run` for a push")
        chains, write = pipeline.dataset._chains, pipeline.write
        to: str | None = pipeline.to
        what = write_options(**{name: write[name] for name in ("max_shard_size", "format", "rewrite") if name in write})
        memory = args.memory or pipeline.run.get("memory")
    else:
        to = args.more.pop() if args.more else None
        args.source = [args.source, *args.more]
        chains, memory = options.dataset(args)._chains, args.memory
        what = write_options(max_shard_size=args.max_shard_size, format=args.format, rewrite=args.rewrite)
    if to is not None:
        from penstock.destination import check_destination

        check_destination(
            Path(to),
            [file for chain in chains for file in chain.read.files],
            sources=[folder for chain in chains for folder in chain.read.folders],
        )
    explained = explain(chains, what, resolve_budget(memory), worker_count(args.workers))
    print(json.dumps(explained.as_json()) if args.json else explained.text())
    return 0
