"""Where a dataset's shards are: in a folder, or in a repository on the Hub, one file of which is here at a time."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import NotFound, UsageError
from penstock.publish.card import DEFAULT, NAME, read_card, split_files
from penstock.publish.patterns import discovered, matching

BIDS_FOLDER = "bids/"

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Shards:
    """The shards of a dataset in order, what lies beside them for a BIDS tree, and how to have any of them here."""

    label: str
    version: str  # of what is read: a commit, or "" for a folder, whose files may change
    names: tuple[str, ...]
    beside: tuple[str, ...]
    sizes: dict[str, int]
    here: Callable[[str], AbstractContextManager[str]]


def find_shards(
    source: str,
    *,
    config: str | None,
    split: str | None,
    scratch: Path,
    revision: str | None = None,
    token: str | None = None,
) -> Shards:
    """The shards of a folder, a file or a repository; of one config and, if one is named, one split."""
    if os.path.isfile(source):
        folder, name = os.path.split(os.path.abspath(source))
        return Shards(source, "", (name,), (), {name: os.stat(source).st_size}, _in_folder(folder))
    if os.path.isdir(source):
        sizes = _files_in(source)
        card = None
        if NAME in sizes:
            with open(os.path.join(source, NAME), encoding="utf-8", errors="replace", newline="") as f:
                card = f.read()
        return _chosen(source, "", sizes, card, _in_folder(source), config=config, split=split)
    if not _REPOSITORY.fullmatch(source):
        raise NotFound("there is no such folder", where=source, do="name a folder of shards, or ORG/NAME on the Hub")
    return _on_hub(source, config=config, split=split, scratch=scratch, revision=revision, token=token)


def _on_hub(
    source: str, *, config: str | None, split: str | None, scratch: Path, revision: str | None, token: str | None
) -> Shards:
    from penstock.publish.hub import HubPlace
    from penstock.publish.retry import patiently

    place = HubPlace(source, token=token, revision=revision)
    look = place.look()
    if not look.exists or look.head is None:
        raise NotFound(
            "there is no such folder here, and no such dataset on the Hub that this token may see",
            where=source,
            do="check the name, the revision and the token",
        )
    commit = look.head

    @contextmanager
    def here(name: str) -> Iterator[str]:
        try:
            yield patiently(
                lambda: place.api.hf_hub_download(
                    source, name, repo_type="dataset", revision=commit, local_dir=scratch
                ),
                what=f"fetching {name}",
                where=source,
                patience=place.patience,
            )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    sizes = {name: file.size for name, file in (look.files or {}).items()}
    stored = place.read(NAME, revision=commit) if NAME in sizes else None
    card = None if stored is None else stored.decode("utf-8", "replace")
    return _chosen(source, commit, sizes, card, here, config=config, split=split)


def _chosen(
    label: str,
    version: str,
    sizes: dict[str, int],
    card: str | None,
    here: Callable[[str], AbstractContextManager[str]],
    *,
    config: str | None,
    split: str | None,
) -> Shards:
    """Which files are meant: those the card names, else all Parquet there is."""
    files = sorted(
        (name for name in sizes if name.endswith(".parquet") and not name.startswith(BIDS_FOLDER)), key=os.fsencode
    )
    if not files:
        raise NotFound("holds no Parquet files", where=label)
    configs = split_files(read_card(card), files) or {DEFAULT: _guessed(files)}
    name = config or (DEFAULT if DEFAULT in configs else next(iter(configs)))
    if name not in configs or (config is None and name != DEFAULT and len(configs) > 1):
        what = f"has no config {config!r}" if config else "has several configs"
        raise UsageError(what, where=label, do=f"choose with --config: {', '.join(configs)}")
    splits = configs[name]
    if split is not None and split not in splits:
        raise UsageError(f"has no split {split!r}", where=label, do=f"choose with --split: {', '.join(splits)}")
    chosen = (file for one, some in splits.items() if split in (None, one) for file in some)
    shards = tuple(dict.fromkeys(file for file in chosen if file.endswith(".parquet")))
    if not shards:
        raise NotFound(f"holds no Parquet files of config {name!r}", where=label)
    beside = tuple(sorted((name for name in sizes if name.startswith(BIDS_FOLDER)), key=os.fsencode))
    return Shards(label, version, shards, beside, sizes, here)


def _guessed(files: list[str]) -> dict[str, list[str]]:
    """Splits as `load_dataset` guesses them from names; what it would not find is taken too."""
    found = {
        split: [file for pattern in patterns for file in matching(pattern, files)]
        for split, patterns in discovered(files).items()
    }
    rest = set(files).difference(*found.values())
    return {**found, "others": sorted(rest, key=os.fsencode)} if rest else found


def _in_folder(folder: str) -> Callable[[str], AbstractContextManager[str]]:
    @contextmanager
    def here(name: str) -> Iterator[str]:
        yield os.path.join(folder, name)

    return here


def _files_in(folder: str) -> dict[str, int]:
    """Every file with its size, by its path from the folder; hidden ones only beside a BIDS tree's."""
    found: dict[str, int] = {}
    for above, folders, names in os.walk(folder):
        inside = os.path.relpath(above, folder).replace(os.sep, "/")
        under = "" if inside == "." else inside + "/"
        every = (under or "/").startswith(BIDS_FOLDER)
        folders[:] = [name for name in folders if every or not name.startswith(".")]
        for name in names:
            if every or not name.startswith("."):
                found[under + name] = os.stat(os.path.join(above, name)).st_size
    return found
