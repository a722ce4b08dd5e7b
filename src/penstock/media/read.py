"""Datasets of files: tables of paths, folders of media, BIDS trees, and what is held in memory.

Each is walked once, its references spooled, and from there on is a dataset like any other: steps, plans, shards.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.chains import Beside, Chain, Read
from penstock.dataset import Dataset
from penstock.media.declare import declare
from penstock.media.spool import spool
from penstock.sources.base import ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.media.found import Found

BIDS_FOLDER = "bids"  # where the files of a tree that are in no row go


def read_files(
    table: Any,
    *,
    media: Mapping[str, str] | Sequence[str] | None = None,
    root: str | os.PathLike[str] | None = None,
) -> Dataset:
    """A dataset of the files a table names.

    Parameters
    ----------
    table
        An Arrow table, a pandas or Polars frame, a dict of lists, a list of dicts, or the path of a CSV, TSV, JSON
        lines or Parquet file. Its media columns hold paths, or lists of paths.
    media
        From column to kind: "image", "audio", "video", "pdf", "nifti", "mesh" or "bytes". Names alone, or nothing:
        kinds are told from the files' endings.
    root
        What relative paths are relative to; without it the table's own folder, or the current one.
    """
    from penstock.media.files import files_table

    return of_found(files_table(table, media=media, root=root))


def read_folder(folder: str | os.PathLike[str], *, kind: str | None = None) -> Dataset:
    """A folder of media files: a column of them, their class from their folder, and what a metadata file says."""
    from penstock.media.folders import media_folder

    return of_found(media_folder(folder, kind=kind))


def read_splits(folder: str | os.PathLike[str]) -> dict[str, Dataset] | None:
    """The splits of a folder of media that has them as folders (train, test, …), with the same columns and the same
    numbers for the same classes; None for anything else."""
    from penstock.media.folders import folder_splits, is_media_folder, media_splits

    kind = is_media_folder(folder)
    if kind is None or not folder_splits(folder):
        return None
    return {split: of_found(found) for split, found in media_splits(folder, kind=kind).items()}


def read_bids(
    root: str | os.PathLike[str],
    *,
    row: str = "session",
    sidecars: bool = True,
    derivatives: bool | str | Iterable[str] = False,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> Dataset:
    """A dataset of a BIDS tree, every run kept.

    Parameters
    ----------
    root
        The folder with `dataset_description.json`.
    row
        What a row is: a "session" (or a subject that has none), a "subject", or a "file".
    sidecars
        Sidecars, events and gradients as texts beside their scan, with what it inherits from above; else as files.
    derivatives
        Names of pipelines under `derivatives/` to take along; True for all.
    include, exclude
        Globs on paths within the tree, or words for what they hold ("anat", "bold").
    """
    from penstock.media.bids import scan_bids

    tree = scan_bids(root, row=row, sidecars=sidecars, derivatives=derivatives, include=include, exclude=exclude)
    tree.check()
    beside = tuple(
        Beside(f"{BIDS_FOLDER}/{one.path_in_tree}", one.file, one.size, os.stat(one.file).st_mtime_ns)
        for one in tree.beside
    )
    name = os.path.basename(os.path.abspath(root))
    return _spooled(declare(tree.schema), tree.batches(), name=name, folders=(os.path.abspath(root),), beside=beside)


def of_found(found: Found) -> Dataset:
    """A dataset of what `files`, `folders` and `frames` give."""
    schema = declare(found.schema, known=found.features)
    return _spooled(schema, found.batches(), name=found.label, folders=found.folders)


def _spooled(
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    name: str,
    folders: tuple[str, ...],
    beside: tuple[Beside, ...] = (),
) -> Dataset:
    files = spool(schema, (batch.replace_schema_metadata(schema.metadata) for batch in batches), name=name)
    return Dataset((Chain(Read(files, "parquet", ReadOptions(), folders, beside)),))
