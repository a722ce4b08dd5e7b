"""git-annex, DataLad and git-lfs trees: whether a name in one has its content here, and what the content must be.

Such trees are the normal state of shared scans: every name is there, most contents are not. A name without content is
a dangling link or a small pointer file, and both carry a key, which often tells a size and a digest.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

# git-annex itself takes no larger file for a pointer.
LARGEST_POINTER = 32 << 10

_OBJECTS = re.compile(r"(?:^|/)annex/objects/(?:[^\n]*/)?([^/\n]+)$")
_KEY = re.compile(
    r"(?P<backend>[A-Z0-9_]+)(?P<fields>(?:-[a-zA-Z][0-9]+)*)--(?P<name>.+)",
    re.DOTALL,
)
_POINTER = b"/annex/objects/"
_LFS = b"version https://git-lfs.github.com/spec/v1\n"
_HEX = re.compile(r"[0-9a-f]+")
# git-annex's names for what hashlib has; the others (SKEIN, VURL, WORM, URL) prove nothing here.
_ALGORITHMS = {
    "MD5": "md5",
    "SHA1": "sha1",
    "SHA224": "sha224",
    "SHA256": "sha256",
    "SHA384": "sha384",
    "SHA512": "sha512",
    "SHA3_224": "sha3_224",
    "SHA3_256": "sha3_256",
    "SHA3_384": "sha3_384",
    "SHA3_512": "sha3_512",
    "BLAKE2B160": "blake2b",
    "BLAKE2B224": "blake2b",
    "BLAKE2B256": "blake2b",
    "BLAKE2B384": "blake2b",
    "BLAKE2B512": "blake2b",
    "BLAKE2S160": "blake2s",
    "BLAKE2S224": "blake2s",
    "BLAKE2S256": "blake2s",
}


class Hash(Protocol):
    """What of hashlib's objects is used."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class Key:
    """What a content must be: its size and digest, each None where the key does not tell."""

    text: str
    backend: str
    size: int | None
    algorithm: str | None = None
    digest: str | None = None  # hexadecimal

    def hasher(self) -> Hash | None:
        """A fresh hash that ends in `digest`; None where there is nothing to compare with."""
        return None if self.algorithm is None or self.digest is None else new_hash(self.algorithm, self.digest)


def new_hash(algorithm: str, digest: str) -> Hash:
    """A hash of the length a digest has: BLAKE2 gives any."""
    if algorithm == "blake2b":
        return hashlib.blake2b(digest_size=len(digest) // 2)
    if algorithm == "blake2s":
        return hashlib.blake2s(digest_size=len(digest) // 2)
    return hashlib.new(algorithm, usedforsecurity=False)


@dataclass(frozen=True)
class NotFetched:
    """A name whose content is elsewhere. `how` is "annex link", "annex pointer" or "lfs pointer"."""

    path: str
    how: str
    key: Key

    @property
    def size(self) -> int | None:
        """Bytes there will be once it is fetched, where the key tells."""
        return self.key.size

    @property
    def fetch_command(self) -> str:
        """What one types to have the content, from any folder."""
        return fetch_command(self.path, lfs=self.how == "lfs pointer")


def not_fetched(path: str | os.PathLike[str] | os.DirEntry[str]) -> NotFetched | None:
    """What stands at a path in the place of its content; None for content, and for what is not there at all.

    An ordinary file costs one lstat; one small enough to be a pointer is opened too.
    """
    name = os.fspath(path)
    try:
        about = path.stat(follow_symlinks=False) if isinstance(path, os.DirEntry) else os.lstat(name)
        if stat.S_ISLNK(about.st_mode):
            key = key_of_link(name)
            return None if key is None or os.path.exists(name) else NotFetched(name, "annex link", key)
        if not stat.S_ISREG(about.st_mode) or not 0 < about.st_size < LARGEST_POINTER:
            return None
        with open(name, "rb", buffering=0) as file:
            return pointer_in(file.read(LARGEST_POINTER), name)
    except OSError:
        return None


def key_of_link(path: str) -> Key | None:
    """The key a link of git-annex's ends in, its content here or not; None for any other link."""
    target = os.readlink(path).replace("\\", "/")
    found = _OBJECTS.search(target)
    return parse_key(found[1]) if found else None


def pointer_in(head: bytes, path: str) -> NotFetched | None:
    """The pointer a small file is, given all of it; None for content."""
    if len(head) >= LARGEST_POINTER:
        return None
    if head.startswith(_LFS):
        key = _lfs_key(head)
        return None if key is None else NotFetched(path, "lfs pointer", key)
    # A file system without links has their target as text, in the place of the link.
    line = head.split(b"\n", 1)[0].rstrip(b"\r")
    if line.startswith(_POINTER) or (line.startswith((b".git/", b"../")) and b"/annex/objects/" in line):
        found = parse_key(os.fsdecode(line).rpartition("/")[2])
        return None if found is None else NotFetched(path, "annex pointer", found)
    return None


def parse_key(text: str) -> Key | None:
    """A key as git-annex writes it, BACKEND-sSIZE--NAME; None for what is none.

    >>> key = parse_key("MD5E-s42--900150983cd24fb0d6963f7d28e17f72.nii.gz")
    >>> key.size, key.algorithm, key.digest
    (42, 'md5', '900150983cd24fb0d6963f7d28e17f72')
    >>> parse_key("URL--http&c%%example.org%scan.nii").digest is None
    True
    """
    match = _KEY.fullmatch(text)
    if match is None:
        return None
    backend = match["backend"]
    fields = {field[0]: int(field[1:]) for field in match["fields"].split("-")[1:]}
    if "C" in fields:  # a chunk, as special remotes store it: its name tells nothing of the whole
        return Key(text, backend, None)
    algorithm = _ALGORITHMS.get(backend) or _ALGORITHMS.get(backend.removesuffix("E"))
    # With E the name keeps the file's ending: digests have no dot.
    digest = match["name"].partition(".")[0] if algorithm else ""
    if not _HEX.fullmatch(digest):
        return Key(text, backend, fields.get("s"))
    return Key(text, backend, fields.get("s"), algorithm, digest)


def fetch_command(path: str, *, lfs: bool = False) -> str:
    """The command that brings a name's content, to be typed as it is."""
    root, datalad = repository_of(path)
    if root is None:
        inner = path
    else:
        inner = os.path.relpath(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)), root)
    # Each of the three takes its path from the root of its repository.
    go = "" if root is None or root == os.path.realpath(".") else f"cd {shlex.quote(root)} && "
    tool = "git lfs pull --include" if lfs else "datalad get" if datalad else "git annex get"
    return f"{go}{tool} {shlex.quote(inner)}"


def submodule_command(folder: str) -> str | None:
    """The command that brings a part of a dataset that is an empty folder here (DataLad's subdatasets are submodules);
    None for any other folder."""
    root, datalad = repository_of(os.path.join(folder, "x"))
    if root is None or os.listdir(folder):
        return None
    inner = os.path.relpath(os.path.realpath(folder), root)
    try:
        with open(os.path.join(root, ".gitmodules"), encoding="utf-8", errors="replace") as file:
            words = (line.partition("=") for line in file)
            named = any(name.strip() == "path" and value.strip().strip('"') == inner for name, _, value in words)
    except OSError:
        return None
    tool = "datalad get" if datalad else "git submodule update --init"
    return f"cd {shlex.quote(root)} && {tool} {shlex.quote(inner)}" if named else None


def repository_of(path: str) -> tuple[str | None, bool]:
    """The root of the repository a path is in, and whether it is a DataLad dataset."""
    return _repository(os.path.realpath(os.path.dirname(path) or "."))


@lru_cache(4096)  # a tree has many names in few folders
def _repository(folder: str) -> tuple[str | None, bool]:
    if os.path.exists(os.path.join(folder, ".git")):
        return folder, os.path.isdir(os.path.join(folder, ".datalad"))
    above = os.path.dirname(folder)
    return (None, False) if above == folder else _repository(above)


def _lfs_key(head: bytes) -> Key | None:
    fields = dict(line.split(" ", 1) for line in head.decode("utf-8", "replace").splitlines() if " " in line)
    algorithm, _, digest = fields.get("oid", "").partition(":")
    if algorithm != "sha256" or not _HEX.fullmatch(digest):
        return None
    size = fields.get("size", "")
    return Key(digest, "LFS", int(size) if size.isdecimal() else None, "sha256", digest)
