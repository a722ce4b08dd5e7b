"""BIDS names: entities, suffix, ending; and where a companion file lies beside its scan. No I/O."""

from __future__ import annotations

import re
from typing import NamedTuple

# The order BIDS gives them in (schema 1.10); entities it does not know come after, in bytewise order.
ENTITIES = (
    "sub", "ses", "sample", "task", "tracksys", "acq", "nuc", "voi", "ce", "trc", "stain", "rec", "dir", "run", "mod",
    "echo", "flip", "inv", "mt", "part", "proc", "hemi", "space", "split", "recording", "chunk", "seg", "res", "den",
    "label", "desc",
)  # fmt: skip
DATATYPES = (
    "anat", "func", "dwi", "fmap", "perf", "pet", "mrs", "eeg", "ieeg", "meg", "nirs", "motion", "micr", "beh",
)  # fmt: skip
NIFTI = (".nii.gz", ".nii")
# Texts that go with a scan as members of its struct. By ending, where they share its stem; by suffix, where they
# describe the same recording.
BY_ENDING = {"sidecar": ".json", "bval": ".bval", "bvec": ".bvec"}
BY_SUFFIX = ("events", "channels", "aslcontext", "blood")
TEXTS = (*BY_ENDING, *BY_SUFFIX)

_STEM = re.compile(r"(?:[A-Za-z0-9]+-[^_/]*_)*([A-Za-z0-9]+(?:-[A-Za-z0-9+]+)*)")


class Name(NamedTuple):
    """A file's name taken apart. `entities` holds `sub` and `ses` too, where the name has them."""

    stem: str
    suffix: str
    ending: str
    entities: dict[str, str]


def parse(name: str) -> Name | None:
    """The parts of a name; None if it is not of BIDS's form.

    >>> parse("sub-01_task-rest_run-2_bold.nii.gz")[1:]
    ('bold', '.nii.gz', {'sub': '01', 'task': 'rest', 'run': '2'})

    Some trees leave the suffix out; their last part stands for it.

    >>> parse("sub-01_lesion-msk.nii.gz").suffix
    'lesion_msk'
    """
    stem, dot, ending = name.partition(".")
    match = _STEM.fullmatch(stem)
    if "_" in ending:  # a value has a point in it ("res-1.5mm"): the last ending is the ending
        whole = name[: -len(".gz")] if name.endswith(".gz") else name
        stem, dot, ending = whole.rpartition(".")
        ending = ending + name[len(whole) :]
        match = _STEM.fullmatch(stem)
    if match is None:
        return None
    parts = stem.split("_")
    entities = dict(part.split("-", 1) for part in parts[:-1])
    return Name(stem, match[1].replace("-", "_"), dot + ending, entities)


def in_order(entities: set[str]) -> list[str]:
    """Entities as BIDS orders them, those it does not know last."""
    return [known for known in ENTITIES if known in entities] + sorted(entities.difference(ENTITIES))


def companion(scan: str, member: str) -> str:
    """Where the text of a scan's member lies, unless its name is kept beside it.

    >>> companion("sub-01/func/sub-01_task-rest_bold.nii.gz", "sidecar")
    'sub-01/func/sub-01_task-rest_bold.json'
    >>> companion("sub-01/func/sub-01_task-rest_bold.nii.gz", "events")
    'sub-01/func/sub-01_task-rest_events.tsv'
    """
    folder, slash, name = scan.rpartition("/")
    parsed = parse(name)
    stem = name.partition(".")[0] if parsed is None else parsed.stem
    if member in BY_ENDING:
        return folder + slash + stem + BY_ENDING[member]
    before, bar, _ = stem.rpartition("_")
    return f"{folder}{slash}{before}{bar}{member}.tsv"
