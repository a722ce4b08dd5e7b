"""`penstock push`: a dataset, media included, to the Hugging Face Hub, a store or a folder, as one transaction."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from penstock.cli import options
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.dataset import Dataset
    from penstock.meter import Watcher
    from penstock.publish.place import Place

HELP = "publish a dataset, media included, to the Hugging Face Hub, a store or a folder, as one transaction"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_source(parser)
    parser.add_argument(
        "to",
        metavar="ORG/NAME",
        help="the dataset repository, made if it is not there; or s3://BUCKET/PREFIX, or a folder (./NAME, /A/PATH)",
    )
    media = parser.add_argument_group("media")
    media.add_argument(
        "--media",
        metavar="COLUMN[=KIND]",
        action="append",
        help="SOURCE is a table, and this column holds paths of files (image, audio, video, pdf, nifti, mesh, bytes)",
    )
    media.add_argument("--root", metavar="DIR", help="what relative paths in the table are relative to")
    media.add_argument("--bids", action="store_true", help="SOURCE is a BIDS tree")
    media.add_argument(
        "--row",
        choices=("session", "subject", "file"),
        default="session",
        help="what a row of a BIDS tree is (default: session)",
    )
    media.add_argument(
        "--no-sidecars", action="store_true", help="keep sidecars, events and gradients as files, not as texts"
    )
    media.add_argument(
        "--derivatives", metavar="NAME", action="append", help="take these pipelines of derivatives/ along (all: '*')"
    )
    media.add_argument("--include", metavar="GLOB", action="append", help="of a BIDS tree, only these paths or kinds")
    media.add_argument("--exclude", metavar="GLOB", action="append", help="of a BIDS tree, not these")
    group = parser.add_argument_group("publishing")
    group.add_argument("--split", metavar="NAME", help="what these rows are called (default: train)")
    group.add_argument(
        "--config", metavar="NAME", default="default", help="the config they belong to (default: default)"
    )
    group.add_argument("--set-default", action="store_true", default=None, help="make this config the default one")
    group.add_argument(
        "--data-dir", metavar="DIR", help="the folder in the repository (default: data, or the config's name)"
    )
    group.add_argument("--private", action="store_true", default=None, help="a repository that is made is private")
    group.add_argument("--revision", metavar="BRANCH", help="push to this branch; made if it is not there")
    group.add_argument("--create-pr", action="store_true", help="open a pull request in place of writing to the branch")
    group.add_argument("--commit-message", metavar="TEXT", help="of the commit that makes it visible")
    group.add_argument("--commit-description", metavar="TEXT", help="its longer description")
    group.add_argument(
        "--max-shard-size", metavar="SIZE", help="bytes a shard holds at most, files included (default: 500MB)"
    )
    group.add_argument("--num-shards", type=int, metavar="N", help="as many shards, in place of a size")
    group.add_argument("--dry-run", action="store_true", help="print the plan and send nothing")
    group.add_argument(
        "--rehearse",
        action="store_true",
        help="do all of it against a Hub on this machine, load it back, verify, and report",
    )
    options.add_running(parser)


def run(args: argparse.Namespace) -> int:
    from penstock.cli.progress import Progress
    from penstock.cli.report import report_push
    from penstock.publish.api import push

    if not args.rehearse:
        _place(args).check()  # what would stop the push is said before a large tree is walked
    dataset = source(args)
    if args.dry_run:
        return _dry_run(args, dataset)
    with Progress(quiet=args.json) as progress:
        if args.rehearse:
            return _rehearse(args, dataset, progress)
        receipt = push(dataset, args.to, watch=progress, **push_arguments(args))
    report_push(receipt, as_json=args.json)
    return 0


def _dry_run(args: argparse.Namespace, dataset: Dataset | dict[str, Dataset]) -> int:
    from penstock.publish.api import splits_of
    from penstock.publish.push import dry_run

    text, figures = dry_run(splits_of(dataset, args.split), _place(args), **_how(args))
    print(json.dumps(figures) if args.json else text)
    return 0


def _place(args: argparse.Namespace) -> Place:
    from penstock.publish.api import place_of

    return place_of(args.to, revision=args.revision, create_pr=args.create_pr, private=args.private)


def _rehearse(args: argparse.Namespace, dataset: Dataset | dict[str, Dataset], progress: Watcher) -> int:
    from penstock.publish.api import place_of, splits_of
    from penstock.publish.hub import HubPlace
    from penstock.publish.rehearse import rehearse

    if not isinstance(place_of(args.to), HubPlace):
        raise UsageError("a rehearsal is of a push to the Hub; this place is as near", where=args.to, do="push to it")
    seen = rehearse(splits_of(dataset, args.split), args.to, private=args.private, watch=progress, **_how(args))
    print(json.dumps(seen.as_json()) if args.json else seen.text())
    return 1 if seen.failed else 0


def _how(args: argparse.Namespace) -> dict[str, Any]:
    from penstock.publish.api import push_settings, push_write
    from penstock.publish.place import Wish

    return {
        "wish": Wish(args.config, args.set_default, args.data_dir, args.commit_message, args.commit_description),
        "write": push_write(args.max_shard_size, args.num_shards),
        "settings": push_settings(
            memory=args.memory,
            disk=args.disk,
            workers=args.workers,
            scratch=args.scratch,
            restart=args.restart,
            command=options.command_line(),
        ),
    }


def source(args: argparse.Namespace) -> Dataset | dict[str, Dataset]:
    """The dataset, or its splits, that the words before ORG/NAME mean."""
    import penstock
    from penstock.media.read import read_splits

    if not args.bids and not args.media:
        if args.source[0].lower().endswith((".csv", ".tsv")) and args.input_format is None:
            raise UsageError("is a table", where=args.source[0], do="name its columns of paths: --media COLUMN=KIND")
        if len(args.source) == 1 and args.split is None and (splits := read_splits(args.source[0])) is not None:
            return splits
        return options.dataset(args)
    if len(args.source) > 1:
        raise UsageError("one BIDS tree or one table at a time", where="push", do="push the others as other splits")
    if args.bids:
        derivatives: Any = False if not args.derivatives else True if "*" in args.derivatives else args.derivatives
        return penstock.read_bids(
            args.source[0],
            row=args.row,
            sidecars=not args.no_sidecars,
            derivatives=derivatives,
            include=args.include,
            exclude=args.exclude,
        )
    pairs = [word.partition("=") for word in args.media]
    if any(equals for _, equals, _ in pairs):
        if not all(equals for _, equals, _ in pairs):
            raise UsageError("name a kind for each --media column, or for none", do="--media t1w=nifti")
        return penstock.read_files(args.source[0], media={column: kind for column, _, kind in pairs}, root=args.root)
    return penstock.read_files(args.source[0], media=[column for column, _, _ in pairs], root=args.root)


def push_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What of the command's words `penstock.push` takes."""
    return {
        "memory": args.memory,
        "config_name": args.config,
        "set_default": args.set_default,
        "split": args.split,
        "data_dir": args.data_dir,
        "commit_message": args.commit_message,
        "commit_description": args.commit_description,
        "private": args.private,
        "revision": args.revision,
        "create_pr": args.create_pr,
        "max_shard_size": args.max_shard_size,
        "num_shards": args.num_shards,
        "disk": args.disk,
        "workers": args.workers,
        "scratch": args.scratch,
        "restart": args.restart,
        "command": options.command_line(),
    }
