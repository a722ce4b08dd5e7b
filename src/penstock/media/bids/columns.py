"""The columns of a tree: what occurs is noted scan by scan, and becomes a schema; scans then become values of it.

Only sets of names are kept, so a tree of a million files costs no more here than one of a hundred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.errors import SourceChanged
from penstock.media.bids.folders import File
from penstock.media.bids.names import DATATYPES, TEXTS, in_order
from penstock.media.bids.scans import Scan
from penstock.media.bids.tables import Table, Types
from penstock.media.kinds import REFERENCE, mark

Value = dict[str, Any]

# A file with no feature of its own: its bytes, and its path beside them. Stored it is a `struct<bytes, path>` too.
OTHER = pa.struct([pa.field("bytes", REFERENCE), pa.field("path", pa.string())])
_DATATYPE = {name: at for at, name in enumerate(DATATYPES)}
_OWN = ("nifti", "bytes", "path", "session", "datatype", "suffix", "derivative", "metadata", "others", "subject")
# Members that hold media: the place, from the member on, and the kind.
MEDIA = {"nifti": ("nifti", "nifti"), "bytes": ("bytes", "bytes"), "others": ("others[].bytes", "bytes")}
_MEMBERS = frozenset((*_OWN, *TEXTS, *(f"{text}_path" for text in TEXTS)))


def entity_member(key: str) -> str:
    """What an entity is called in a scan's struct.

    >>> entity_member("run"), entity_member("path")
    ('run', 'entity_path')
    """
    return f"entity_{key}" if key in _MEMBERS else key


@dataclass
class Facts:
    """What occurs among the scans of one column."""

    source: int = 0  # the tree itself, then its derivatives
    files: int = 0
    rows: int = 0
    entities: dict[str, bool] = field(default_factory=dict)  # and whether every value is a whole number
    datatypes: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)

    def see(self, scan: Scan, texts: Mapping[str, str]) -> None:
        self.files += 1
        for key, value in scan.name.entities.items():
            if key not in ("sub", "ses"):
                self.entities[key] = self.entities.get(key, True) and value.isdecimal() and len(value) < 18
        self.datatypes.add(scan.datatype)
        self.members |= {"nifti"} if scan.is_nifti else {"bytes", "path"}
        self.members |= texts.keys()
        self.members |= {f"{member}_path" for member in texts if scan.named(member)}
        if scan.others:
            self.members.add("others")
        if scan.inherited:
            self.members.add("metadata")

    def place(self, name: str) -> tuple[int, int, str]:
        """Where the column stands: the tree's own before derived ones, by datatype, then by name."""
        return self.source, min((_DATATYPE.get(one, len(_DATATYPE)) for one in self.datatypes), default=0), name

    def fields(self, *, row: str) -> list[pa.Field]:
        """The members of a scan's struct: the file, what sets it apart from its neighbours, what goes with it."""
        found = [pa.field("nifti", REFERENCE)] if "nifti" in self.members else []
        if "bytes" in self.members:
            found += [pa.field("bytes", REFERENCE), pa.field("path", pa.string())]
        if row == "subject":
            found.append(pa.field("session", pa.string()))
        if len(self.datatypes) > 1 and row != "file":
            found.append(pa.field("datatype", pa.string()))
        for key in in_order(set(self.entities)):
            number = self.entities[key] and key in ("run", "echo", "split", "chunk", "inv", "flip")
            found.append(pa.field(entity_member(key), pa.int64() if number else pa.string()))
        for member in (*TEXTS, "metadata"):
            found += [pa.field(name, pa.string()) for name in (member, f"{member}_path") if name in self.members]
        if "others" in self.members:
            found.append(pa.field("others", pa.list_(OTHER)))
        return found


@dataclass(frozen=True)
class Layout:
    """The columns of a tree, and how what is in its tables is called among them."""

    row: str
    schema: pa.Schema
    scans: tuple[str, ...]  # columns of scans
    participants: Table
    participant_types: dict[str, tuple[str, pa.DataType]]  # from the table's name to the column's and its type
    session_types: dict[str, tuple[str, pa.DataType]]


def layout(facts: Mapping[str, Facts], participants: Table, visits: Types, *, row: str, derived: bool) -> Layout:
    """The columns for what was found."""
    order = sorted(facts, key=lambda name: facts[name].place(name))
    if row == "file":
        scans = [pa.field("derivative", pa.string())] if derived else []
        scans += [pa.field("datatype", pa.string()), pa.field("suffix", pa.string())]
        for one in facts[""].fields(row=row):
            place, kind = MEDIA.get(one.name, ("", ""))
            scans.append(mark(one, {place.removeprefix(one.name): kind}) if kind else one)
    else:
        scans = [_column(name, facts[name].fields(row=row)) for name in order]
        scans.append(mark(pa.field("others", pa.list_(OTHER)), {"[].bytes": "bytes"}))
    taken = {"subject", "session", "sessions", *(one.name for one in scans)}
    types = Types()
    types.see(participants)
    persons = _apart(types, prefix="participant", taken=taken)
    sessions = _apart(visits, prefix="session", taken={"session"} if row == "subject" else taken)
    head = [pa.field("subject", pa.string(), nullable=False)]
    if row != "subject":
        head.append(pa.field("session", pa.string()))
    tables = [pa.field(*one) for one in persons.values()]
    own = [pa.field(*one) for one in sessions.values()]
    if row == "subject" and own:
        own = [pa.field("sessions", pa.list_(pa.struct([pa.field("session", pa.string()), *own])))]
    columns = () if row == "file" else tuple(order)
    return Layout(row, pa.schema([*head, *tables, *own, *scans]), columns, participants, persons, sessions)


def _column(name: str, fields: Sequence[pa.Field]) -> pa.Field:
    """The column of a list of scans with these members."""
    kinds = {f"[].{place}": kind for one in fields for place, kind in [MEDIA.get(one.name, ("", ""))] if kind}
    return mark(pa.field(name, pa.list_(pa.struct(fields))), kinds)


def _apart(types: Types, *, prefix: str, taken: set[str]) -> dict[str, tuple[str, pa.DataType]]:
    """What each column of a table is called among the others: its own name, or with a prefix where that is taken."""
    found: dict[str, tuple[str, pa.DataType]] = {}
    for name, kind in types:
        new = name
        while new in taken:
            new = f"{prefix}_{new}"
        taken.add(new)
        found[name] = new, kind
    return found


def value_of(
    scan: Scan, texts: Mapping[str, str], metadata: str | None, kinds: Mapping[str, pa.DataType], *, session: str | None
) -> Value:
    """A scan as a value of its column, whose members and their types are `kinds`."""
    value: Value = {}
    if scan.is_nifti:
        value["nifti"] = reference(scan.file)
    else:
        value["bytes"], value["path"] = reference(scan.file), scan.file.path
    for key, label in scan.name.entities.items():
        if key not in ("sub", "ses"):
            member = entity_member(key)
            value[member] = int(label) if kinds.get(member) == pa.int64() else label
    for member, text in texts.items():
        value[member] = text
        if scan.named(member):
            value[f"{member}_path"] = scan.texts[member].path
    if metadata is not None:
        value["metadata"] = metadata
    if "others" in kinds:
        value["others"] = [other(file) for file in scan.others]
    elif scan.others:
        raise changed(scan.others[0].file)
    if not kinds.keys() >= value.keys():
        raise changed(scan.file.file)
    if "session" in kinds:
        value["session"] = session
    if "datatype" in kinds:
        value["datatype"] = scan.datatype
    return value


def reference(file: File) -> Value:
    return {"bytes": None, "path": file.path, "file": file.file, "size": file.size, "modified": file.modified}


def other(file: File) -> Value:
    return {"bytes": reference(file), "path": file.path}


def changed(file: str) -> SourceChanged:
    return SourceChanged("is new since the tree was looked through", where=file, do="run it again")
