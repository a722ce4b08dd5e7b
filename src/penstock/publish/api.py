"""`ps.push`: whatever a user holds, published. `push_to_hub`'s keywords, and a budget."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.budget import parse_size, resolve_budget
from penstock.chains import Chain, Write
from penstock.dataset import DEFAULT_SHARD, Dataset, read, worker_count
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.meter import Watcher
    from penstock.publish.place import Place
    from penstock.receipt import Receipt


def push(
    dataset: Any,
    to: str | os.PathLike[str],
    *,
    memory: str | int | None = None,
    config_name: str = "default",
    set_default: bool | None = None,
    split: str | None = None,
    data_dir: str | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: str | int | None = None,
    num_shards: int | None = None,
    embed_external_files: bool = True,
    num_proc: int | None = None,
    disk: str | int | None = None,
    workers: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
    restart: bool = False,
    watch: Watcher | None = None,
    command: str | None = None,
) -> Receipt:
    """Publish a dataset to the Hugging Face Hub, a store or a folder, as one transaction, under a memory budget.

    In place of `hf_dataset.push_to_hub("org/name")`: `ps.push(hf_dataset, "org/name")`, with the same keywords. Run
    again after any kill: it goes on, and sends nothing twice. Nothing is visible before everything is there.

    Parameters
    ----------
    dataset
        A `Dataset`, a `datasets.Dataset` or `DatasetDict`, an Arrow table, a frame, a path as `read` takes it (a folder
        of media with train/ and test/ in it is these splits), or a dict of any of these by split.
    to
        A dataset repository, "org/name"; it is made if it is not there. Or an S3-style store, "s3://bucket/prefix",
        or a folder: "./name", "/a/path" or "file:///a/path".
    memory
        What the whole process tree may take, such as "2GB". See `Dataset.write`.
    split
        What these rows are called; "train" where nothing else says. A dict brings its own names.
    data_dir
        The folder in the repository; "data", or the config's name.
    private
        Whether a repository that is made is private. One that is there stays as it is.
    max_shard_size
        Bytes a shard holds at most, files included, unless one row is larger. Default: 500MB.
    num_shards
        As many shards, in place of a size; fewer where there are not as many row groups.
    disk
        What may be staged at a time, where rows must be made before they are sent.
    """
    from penstock.publish.place import Wish
    from penstock.publish.push import push as run_push

    if not embed_external_files:
        raise UsageError("files are always embedded: a path of this machine means nothing elsewhere", where="push")
    place = place_of(to, token=token, revision=revision, create_pr=create_pr, private=private)
    settings = push_settings(
        memory=memory, disk=disk, workers=workers or num_proc, scratch=scratch, restart=restart, command=command
    )
    return run_push(
        splits_of(dataset, split),
        place,
        wish=Wish(config_name, set_default, data_dir, commit_message, commit_description),
        write=push_write(max_shard_size, num_shards),
        settings=settings,
        watch=watch or (lambda status: None),
    )


def place_of(
    to: str | os.PathLike[str],
    *,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    private: bool | None = None,
) -> Place:
    """The place a user means. A folder has a "/" or "." before it, so that "org/name" is always the Hub's."""
    words = os.fspath(to)
    if words.startswith("s3://"):
        from penstock.publish.store import StorePlace

        _only_on_the_hub(words, token=token, revision=revision, create_pr=create_pr or None, private=private)
        return StorePlace(words)
    if isinstance(to, os.PathLike) or words in (".", "..") or words.startswith(("/", "./", "../", "~", "file://")):
        from penstock.publish.folder import FolderPlace

        _only_on_the_hub(words, token=token, revision=revision, create_pr=create_pr or None, private=private)
        return FolderPlace(words)
    if "://" in words:
        raise UsageError(
            "is no place that can be published to",
            where=words,
            do='name a repository of the Hub ("org/name"), a store ("s3://bucket/prefix") or a folder ("./name")',
        )
    from penstock.publish.hub import HubPlace

    return HubPlace(words, token=token, revision=revision, create_pr=create_pr, private=private)


def _only_on_the_hub(where: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} means something only on the Hub", where=where, do=f"leave {name} out")


def push_write(max_shard_size: str | int | None, num_shards: int | None) -> Write:
    if max_shard_size is not None and num_shards is not None:
        raise UsageError("max_shard_size and num_shards were both given", do="pass one of them")
    if num_shards is not None and num_shards < 1:
        raise UsageError(f"num_shards must be at least 1, not {num_shards!r}")
    return Write("parquet", parse_size(max_shard_size or DEFAULT_SHARD, name="max_shard_size"), num_shards=num_shards)


def push_settings(**given: Any) -> Any:
    from penstock.run import Settings

    place = given["scratch"] if given["scratch"] is not None else os.environ.get("PENSTOCK_SCRATCH") or None
    command = given["command"]
    return Settings(
        budget=resolve_budget(given["memory"]),
        workers=worker_count(given["workers"]),
        scratch=None if place is None else Path(place),
        disk=None if given["disk"] is None else parse_size(given["disk"], name="disk"),
        restart=given["restart"],
        command=command if command is not None else shlex.join(["python", *map(os.path.basename, sys.argv[:1])]),
    )


def splits_of(dataset: Any, split: str | None) -> dict[str, Sequence[Chain]]:
    """The splits a user's object stands for."""
    from penstock.media.frames import frame_splits

    parts = frame_splits(dataset) if not isinstance(dataset, Dataset) else None
    if parts is None and isinstance(dataset, Mapping) and all(map(_is_split, dataset.values())):
        parts = dict(dataset)
    if parts is None and split is None and isinstance(dataset, str | os.PathLike):
        from penstock.media.read import read_splits

        parts = dict(found) if (found := read_splits(dataset)) is not None else None
    if parts is not None:
        if split is not None:
            raise UsageError("a dict of splits has their names already", where="push", do="leave split= out")
        return {str(name): as_dataset(one)._chains for name, one in parts.items()}
    named = split or str(getattr(dataset, "split", None) or "train")
    return {named: as_dataset(dataset)._chains}


def _is_split(thing: Any) -> bool:
    """A dict of lists is a table; of anything else, splits by name."""
    return isinstance(thing, Dataset | Mapping | str | os.PathLike)


def as_dataset(thing: Any) -> Dataset:
    return thing if isinstance(thing, Dataset) else read(thing)
