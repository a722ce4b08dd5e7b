"""How each kind of file is opened to its end: which probe a name or its first bytes ask for.

A probe reads through a `Reader` and raises `Broken` or `Truncated` with the reason; a new kind is a function and a line
here. What has no probe is read to its end all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from penstock.media.probes import archives, audio, containers, images, meshes, nifti, text, video
from penstock.media.probes.reader import COMPRESSIONS, MAGICS, Broken, FileReader, Reader, Truncated

__all__ = ["KINDS", "TEXT", "Broken", "FileReader", "Reader", "Truncated", "kind_of", "plan_of", "probe"]

# A probe may say that the file is of another kind than its name told.
Probe = Callable[[Reader, str], str | None]


@dataclass(frozen=True)
class Plan:
    """How a file is read: the kind it counts as, the probe, and what it is compressed with."""

    kind: str
    run: Probe
    compression: str = ""


def _rest(reader: Reader, path: str) -> None:
    reader.drain()


_BY_ENDING: dict[str, tuple[str, Probe]] = {
    **dict.fromkeys((".nii",), ("nifti", nifti.nifti)),
    **dict.fromkeys((".hdr",), ("header", nifti.header_file)),
    **dict.fromkeys((".img",), ("nifti", nifti.image_file)),
    **dict.fromkeys((".mgh", ".mgz"), ("mgh", nifti.mgh)),
    **dict.fromkeys(
        (".png", ".jpg", ".jpeg", ".jpe", ".gif", ".webp", ".tif", ".tiff", ".bmp", ".heic", ".heif", ".avif", ".jp2"),
        ("image", images.image),
    ),
    **dict.fromkeys(
        (".wav", ".wave", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".m4a", ".aac", ".aif", ".aiff", ".aifc"),
        ("audio", audio.audio),
    ),
    **dict.fromkeys((".mp4", ".m4v", ".mov", ".3gp", ".qt"), ("video", video.boxes)),
    **dict.fromkeys((".webm", ".mkv", ".mka"), ("video", video.matroska)),
    **dict.fromkeys((".avi",), ("video", video.avi)),
    **dict.fromkeys((".m2ts", ".mts"), ("video", _rest)),
    **dict.fromkeys((".pdf",), ("pdf", containers.pdf)),
    **dict.fromkeys((".stl",), ("mesh", meshes.stl)),
    **dict.fromkeys((".ply",), ("mesh", meshes.ply)),
    **dict.fromkeys((".obj",), ("mesh", meshes.obj)),
    **dict.fromkeys((".off",), ("mesh", meshes.off)),
    **dict.fromkeys((".glb",), ("mesh", meshes.glb)),
    **dict.fromkeys((".gltf",), ("mesh", meshes.gltf)),
    **dict.fromkeys((".gii",), ("mesh", text.xml)),
    **dict.fromkeys((".json",), ("json", text.json_text)),
    **dict.fromkeys((".jsonl", ".ndjson"), ("json", text.json_lines)),
    **dict.fromkeys((".tsv",), ("table", text.tsv)),
    **dict.fromkeys((".csv",), ("table", text.csv)),
    **dict.fromkeys((".bval", ".bvec"), ("gradients", text.numbers)),
    **dict.fromkeys((".xml", ".svg"), ("text", text.xml)),
    **dict.fromkeys((".txt", ".md", ".rst", ".yaml", ".yml", ".toml", ".py", ".m", ".log"), ("text", text.plain)),
    **dict.fromkeys((".parquet",), ("parquet", containers.parquet)),
    **dict.fromkeys((".arrow", ".feather"), ("arrow", containers.arrow_file)),
    **dict.fromkeys((".npy",), ("array", containers.npy)),
    **dict.fromkeys((".npz",), ("array", archives.zipped)),
    **dict.fromkeys((".h5", ".hdf5", ".nwb"), ("hdf5", containers.hdf5)),
    **dict.fromkeys((".safetensors",), ("safetensors", containers.safetensors)),
    **dict.fromkeys((".edf", ".bdf"), ("signal", containers.edf)),
    **dict.fromkeys((".zip",), ("archive", archives.zipped)),
    **dict.fromkeys((".tar",), ("archive", archives.tar)),
}
# Names that say both at once.
_SHORT = {".tgz": (".tar", ".gz"), ".tbz2": (".tar", ".bz2"), ".txz": (".tar", ".xz"), ".mgz": (".mgh", ".gz")}
_OTHER: tuple[str, Probe] = ("other", _rest)
_COMPRESSED: tuple[str, Probe] = ("compressed", _rest)

KINDS = tuple(sorted({kind for kind, _ in _BY_ENDING.values()} | {"other", "compressed"}))
# Beside scans lie many small texts that are rightly the same: sidecars, gradients, events.
TEXT = frozenset({"json", "table", "gradients", "text", "header"})

_BY_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"\xff\xd8\xff", ".jpg"),
    (b"GIF8", ".gif"),
    (b"%PDF-", ".pdf"),
    (b"fLaC", ".flac"),
    (b"OggS", ".ogg"),
    (b"PAR1", ".parquet"),
    (b"\x93NUMPY", ".npy"),
    (b"PK\3\4", ".zip"),
    (b"\x1a\x45\xdf\xa3", ".webm"),
    (b"glTF", ".glb"),
    (b"\x89HDF\r\n\x1a\n", ".h5"),
    (b"\x5c\x01\0\0", ".hdr"),
)


def kind_of(name: str) -> str:
    """What a file counts as, from its name alone.

    >>> kind_of("sub-01_T1w.nii.gz"), kind_of("events.tsv"), kind_of("README")
    ('nifti', 'table', 'other')
    """
    return _by_name(name).kind


def plan_of(name: str, head: bytes) -> Plan:
    """How a file is read: by its name, and where that tells nothing by its first bytes."""
    plan = _by_name(name)
    if plan.run is not _rest or plan.compression:
        return plan
    for magic, ending in MAGICS:
        if head.startswith(magic):
            return Plan(*_COMPRESSED, ending)
    for magic, ending in _BY_MAGIC:
        if head.startswith(magic):
            if ending == ".hdr":
                return Plan("nifti", nifti.nifti) if head[344:348] == b"n+1\0" else plan
            return Plan(*_BY_ENDING[ending])
    return plan


def probe(reader: Reader, plan: Plan, path: str) -> str:
    """Read a file to its end; the kind it turned out to be. `Broken` or `Truncated` where it is not whole."""
    inner: Reader = reader
    if plan.compression:
        head = reader.peek(16)
        magic = next((magic for magic, ending in MAGICS if ending == _as_magic(plan.compression)), b"")
        if not head.startswith(magic) and not (plan.compression == ".zst" and head[1:4] == b"\x2a\x4d\x18"):
            raise Broken(f"it is not {plan.compression[1:]}-compressed as its name says: {nifti.begins_with(head)}")
        inner = COMPRESSIONS[plan.compression](reader)
    kind = plan.run(inner, path) or plan.kind
    inner.drain()
    reader.drain()
    return kind


def _as_magic(ending: str) -> str:
    return ".gz" if ending == ".bgz" else ending


def _by_name(name: str) -> Plan:
    stem, ending = _split(name.lower())
    return _by_endings(_split(stem)[1] if ending in COMPRESSIONS else "", ending)


@lru_cache(1024)  # a tree has many names and few endings
def _by_endings(inside: str, ending: str) -> Plan:
    if ending in _SHORT:
        short, compression = _SHORT[ending]
        return Plan(*_BY_ENDING[short], compression)
    if ending in COMPRESSIONS:
        return Plan(*_BY_ENDING.get(inside, _COMPRESSED), ending)
    return Plan(*_BY_ENDING.get(ending, _OTHER))


def _split(name: str) -> tuple[str, str]:
    stem, dot, ending = name.rpartition("/")[2].rpartition(".")
    return (stem, dot + ending) if dot and stem else (name, "")
