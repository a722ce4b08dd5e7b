"""`penstock plan`: what a `convert` or a pipeline would do and take, before it is done."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import options

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

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
            return _plan_push(pipeline, args)
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


def _plan_push(pipeline: Pipeline, args: argparse.Namespace) -> int:
    """What a pipeline that pushes would send, and where."""
    from penstock.publish.api import place_of, push_settings, push_write, splits_of
    from penstock.publish.place import Wish
    from penstock.publish.push import dry_run

    words = pipeline.write
    running = {**pipeline.run, **({"memory": args.memory} if args.memory else {})}
    text, figures = dry_run(
        splits_of(pipeline.dataset, words.get("split")),
        place_of(pipeline.to, **{name: words[name] for name in ("revision", "create_pr", "private") if name in words}),
        wish=Wish(words.get("config_name", "default"), words.get("set_default"), words.get("data_dir")),
        write=push_write(words.get("max_shard_size"), words.get("num_shards")),
        settings=push_settings(
            memory=running.get("memory"),
            disk=running.get("disk"),
            workers=running.get("workers"),
            scratch=running.get("scratch"),
            restart=False,
            command="",
        ),
    )
    print(json.dumps(figures) if args.json else text)
    return 0
