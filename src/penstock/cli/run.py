"""`penstock run`: a pipeline file, with a source, steps and a destination."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli import options

HELP = "run a pipeline.yaml: a source, steps, a destination"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pipeline", metavar="PIPELINE.yaml", help="the same words as the Python calls; see docs/reference/pipeline.md"
    )
    options.add_running(parser)


def run(args: argparse.Namespace) -> int:
    from penstock.cli.progress import Progress
    from penstock.cli.report import report, report_push
    from penstock.pipeline import load

    pipeline = load(Path(args.pipeline))
    given = {"memory": args.memory, "disk": args.disk, "workers": args.workers, "scratch": args.scratch}
    running = {**pipeline.run, **{name: value for name, value in given.items() if value is not None}}
    how = {**pipeline.write, **running, "restart": args.restart, "command": options.command_line()}
    with Progress(quiet=args.json) as progress:
        if pipeline.pushes:
            receipt = pipeline.dataset.push(pipeline.to, watch=progress, **how)
        else:
            receipt = pipeline.dataset.write(pipeline.to, watch=progress, engine=args.engine, **how)
    if pipeline.pushes:
        report_push(receipt, as_json=args.json)
    else:
        report(receipt, pipeline.to, as_json=args.json)
    return 0
