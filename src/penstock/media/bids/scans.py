"""The files of one session (or subject) as scans, each with the companions that describe it, and the others.

No file is dropped here: every one is a scan, a companion, or among the others. A companion goes with a scan of the
same stem, or of the same entities; one that describes several is with all of them if it is text, else with the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.media.bids.folders import File
from penstock.media.bids.names import BY_ENDING, BY_SUFFIX, DATATYPES, NIFTI, Name, companion, parse
from penstock.media.bids.selection import Keep

# What only describes: a stem that has nothing else is no scan.
_DESCRIBES = (".json", ".tsv", ".tsv.gz", ".bval", ".bvec", ".txt", ".csv", ".html", ".md", ".log", ".svg")
# Of the files of one recording, the one that readers open.
_OPENED = (".vhdr", ".set", ".edf", ".bdf", ".fif", ".snirf", ".hdr", ".ome.tif", ".ome.btf")
# Names of columns that are there anyway.
RESERVED = ("subject", "session", "sessions", "others")


@dataclass(slots=True)
class Scan:
    """One file of data and what goes with it. `texts` maps members of its struct to files."""

    file: File
    name: Name
    datatype: str
    texts: dict[str, File] = field(default_factory=dict)
    others: list[File] = field(default_factory=list)
    inherited: list[File] = field(default_factory=list)  # sidecars above its own, the farthest first
    follows: bool = False  # one more file of the recording before it, which has the companions

    @property
    def column(self) -> str:
        return self.name.suffix.lower()

    @property
    def is_nifti(self) -> bool:
        return self.name.ending.lower() in NIFTI

    def named(self, member: str) -> bool:
        """Whether a text's name does not follow from the scan's and must be kept beside it."""
        return self.texts[member].path != companion(self.file.path, member)


@dataclass(slots=True)
class Gathered:
    """What was found in one row's folder."""

    scans: list[Scan] = field(default_factory=list)
    others: list[File] = field(default_factory=list)
    left_out: int = 0

    def __bool__(self) -> bool:
        return bool(self.scans or self.others)


class Above:
    """Files in the folders above a scan, from which it inherits: level by level, the farthest first."""

    def __init__(self, *levels: Iterable[File]) -> None:
        self._levels = [_by_role(level) for level in levels]

    def and_below(self, level: Iterable[File]) -> Above:
        made = Above()
        made._levels = [*self._levels, _by_role(level)]
        return made

    def sidecars(self, scan: Name) -> list[File]:
        """What a scan's metadata are made of, the file that wins last."""
        return [
            file
            for level in self._levels
            for file, name in level.get((scan.suffix, ".json"), ())
            if _within(name, scan)
        ]

    def text(self, member: str, scan: Name) -> File | None:
        """The nearest file that stands for a member; of one level, the one that says most."""
        if member not in BY_ENDING and scan.suffix == "sbref":
            return None  # a reference image shares its run's entities, but nothing happens in it
        role = (scan.suffix, BY_ENDING[member]) if member in BY_ENDING else (member, ".tsv")
        for level in reversed(self._levels):
            fits = [file for file, name in level.get(role, ()) if _within(name, scan)]
            if fits:
                return fits[-1]
        return None


def _by_role(files: Iterable[File]) -> dict[tuple[str, str], list[tuple[File, Name]]]:
    """Files by suffix and ending; those with more entities, which say more, after those with fewer."""
    found: dict[tuple[str, str], list[tuple[File, Name]]] = {}
    for file in files:
        if (name := parse(file.path.rpartition("/")[2])) is not None:
            found.setdefault((name.suffix, name.ending), []).append((file, name))
    for role in found.values():
        role.sort(key=lambda one: len(one[1].entities))
    return found


def _within(name: Name, scan: Name, but: Sequence[str] = ()) -> bool:
    """Whether all a companion's entities are the scan's too."""
    return all(scan.entities.get(key) == value for key, value in name.entities.items() if key not in but)


def gather(files: Iterable[File], base: str, above: Above, *, sidecars: bool, keep: Keep | None) -> Gathered:
    """The scans in a row's folder, whose path in the tree is `base`."""
    found = Gathered()
    loose: list[File] = []
    folders: dict[str, list[File]] = {}
    for file in files:
        datatype, slash, _ = file.path[len(base) + 1 :].partition("/")
        (folders.setdefault(datatype, []) if slash else loose).append(file)
    found.others += loose
    here = above.and_below(loose)
    for datatype in sorted(folders, key=_place):
        _gather_folder(folders[datatype], f"{base}/{datatype}", datatype, here, found, sidecars=sidecars)
    if keep is not None:
        _leave_out(found, base, keep)
    return found


def _place(datatype: str) -> tuple[int, str]:
    return (DATATYPES.index(datatype) if datatype in DATATYPES else len(DATATYPES)), datatype


def _gather_folder(
    files: list[File], base: str, datatype: str, above: Above, found: Gathered, *, sidecars: bool
) -> None:
    stems: dict[str, list[tuple[File, Name]]] = {}
    for file in files:
        # A recording may be a folder ("…_meg.ds"): its name is the scan's, and each file in it one of the scan's files.
        name = parse(file.path[len(base) + 1 :].partition("/")[0])
        if name is None or "sub" not in name.entities or name.suffix.lower() in RESERVED:
            found.others.append(file)
        else:
            stems.setdefault(name.stem, []).append((file, name))
    scans: list[Scan] = []
    waiting: list[tuple[File, Name]] = []
    for group in stems.values():
        data = _data(group)
        if not data:
            waiting += group
            continue
        own = [Scan(file, name, datatype) for file, name in data]
        for scan in own[1:]:
            scan.follows = not scan.is_nifti
        taken = {file.path for file, _ in data}
        for file, name in group:
            if file.path in taken:
                continue
            member = next((member for member, ending in BY_ENDING.items() if ending == name.ending), None)
            if sidecars and member is not None:
                for scan in own:
                    if not scan.follows:
                        scan.texts[member] = file
            else:
                own[0].others.append(file)
        scans += own
    scans.sort(key=lambda scan: scan.file.path)
    # Texts of this folder that are no scan's own are inherited within it, and stay in the tree as the files they are.
    here = above.and_below(file for file, _ in waiting) if sidecars else above
    used: set[str] = set()
    suffixes = {scan.name.suffix for scan in scans}
    if sidecars:
        for scan in (scan for scan in scans if not scan.follows):
            for member in ("bval", "bvec", *BY_SUFFIX):
                if member not in scan.texts and (text := here.text(member, scan.name)) is not None:
                    scan.texts[member] = text
                    used.add(text.path)
            scan.inherited = [file for file in here.sidecars(scan.name) if file != scan.texts.get("sidecar")]
    for file, name in waiting:
        if file.path in used:
            continue
        describes = len(name.entities.keys() - {"sub", "ses", "recording"}) > 0
        owner = next((scan for scan in scans if describes and _within(name, scan.name, but=("recording",))), None)
        inherited = name.ending == ".json" and name.suffix in suffixes
        (found.others if owner is None or inherited else owner.others).append(file)
    found.scans += scans


def _data(group: list[tuple[File, Name]]) -> list[tuple[File, Name]]:
    """The files of one stem that are scans: each NIfTI, every file of a recording that is a folder, or else the one of
    them that readers open."""
    niftis = [(file, name) for file, name in group if name.ending.lower() in NIFTI]
    if niftis:
        return niftis
    inside = [(file, name) for file, name in group if file.path.rpartition("/")[2] != name.stem + name.ending]
    if inside:
        return inside
    data = [(file, name) for file, name in group if name.ending.lower() not in _DESCRIBES]
    opened = [one for ending in _OPENED for one in data if one[1].ending.lower() == ending]
    return (opened or data)[:1]


def _leave_out(found: Gathered, base: str, keep: Keep) -> None:
    """Leave out what was not asked for. A scan takes its companions with it, but for a text another scan has too."""
    scans = [scan for scan in found.scans if keep.scan(scan.file.path, scan.name.suffix)]
    before = {file.path for file in _files(found)}
    for scan in scans:
        scan.texts = {member: text for member, text in scan.texts.items() if keep.companion(text.path)}
        scan.others = [file for file in scan.others if keep.companion(file.path)]
    found.scans = scans
    found.others = [file for file in found.others if keep.other(file.path)]
    gone = before.difference(file.path for file in _files(found))
    found.left_out = sum(path.startswith(base + "/") for path in gone)


def _files(found: Gathered) -> Iterator[File]:
    yield from found.others
    for scan in found.scans:
        yield scan.file
        yield from scan.texts.values()
        yield from scan.others
