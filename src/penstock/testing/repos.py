"""What a loopback Hub holds, in a folder: blobs by SHA-256, repositories as commits and refs.

    blobs/ab/abcd…                          whole, or not there
    uploads/<id>/                           multipart uploads under way
    repos/datasets/<namespace>/<name>/repo.json            private, created, refs
    repos/datasets/<namespace>/<name>/commits/<oid>.json   parent, title, tree: path -> size, oid, sha256, lfs

A commit's file is written before the ref that names it, each by rename, so a server killed at any moment finds either
state again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from io import RawIOBase
from pathlib import Path
from typing import Any, cast

from penstock.testing.wire import Refused, read_in_buffers, replace_file, write_all

Entry = dict[str, Any]  # size, oid (git's), sha256, lfs, commit (the last that changed it)
Tree = dict[str, Entry]

MAIN = "refs/heads/main"
_OID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    description: str
    author: str
    date: str
    tree: Tree


class Blobs:
    """Files by the SHA-256 of their content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "blobs"
        self.uploads = folder / "uploads"
        self.folder.mkdir(exist_ok=True)
        self.uploads.mkdir(exist_ok=True)
        for left in self.uploads.glob("*.arriving"):  # what a killed server was receiving
            left.unlink()

    def path(self, sha256: str) -> Path:
        if not _OID.fullmatch(sha256):
            raise Refused(422, f"not a SHA-256: {sha256!r}")
        return self.folder / sha256[:2] / sha256

    def size(self, sha256: str) -> int | None:
        """None: not there."""
        try:
            return self.path(sha256).stat().st_size
        except FileNotFoundError:
            return None

    def receive(self, body: RawIOBase, sha256: str) -> None:
        """Store a body if it is what it should be."""
        path = self.path(sha256)
        temporary = self.uploads / f"{secrets.token_hex(8)}.arriving"
        try:
            digest = hashlib.sha256()
            with temporary.open("wb", buffering=0) as out:
                for piece in read_in_buffers(body):
                    digest.update(piece)
                    write_all(out.fileno(), piece)
            if digest.hexdigest() != sha256:
                raise Refused(400, f"the content's SHA-256 is {digest.hexdigest()}, not {sha256}")
            path.parent.mkdir(exist_ok=True)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def put(self, data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        replace_file(self.path(sha256), data)
        return sha256

    def start_parts(self) -> str:
        upload = secrets.token_hex(8)
        (self.uploads / upload).mkdir()
        return upload

    def receive_part(self, body: RawIOBase, upload: str, number: int, chunk: int) -> str:
        """Write a part where it belongs in the whole; its tag."""
        folder = self._upload(upload)
        tag, at = 0, (number - 1) * chunk  # a CRC names the part well enough: the whole is checked by its SHA-256
        fd = os.open(folder / "whole", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            for piece in read_in_buffers(body):
                if at + len(piece) > number * chunk:
                    raise Refused(400, f"part {number} is longer than {chunk:,} bytes")
                tag = zlib.crc32(piece, tag)
                write_all(fd, piece, at)
                at += len(piece)
        finally:
            os.close(fd)
        replace_file(folder / f"{number}.tag", f"{tag:08x}".encode())
        return f"{tag:08x}"

    def finish_parts(self, upload: str, sha256: str, tags: Mapping[int, str]) -> None:
        folder = self._upload(upload)
        for number, tag in tags.items():
            stored = folder / f"{number}.tag"
            if not stored.exists() or stored.read_text() != tag.strip('"'):
                raise Refused(400, f"part {number} was not uploaded, or not with this ETag")
        digest = hashlib.sha256()
        with (folder / "whole").open("rb", buffering=0) as whole:
            for piece in read_in_buffers(whole):
                digest.update(piece)
        if digest.hexdigest() != sha256:
            raise Refused(400, f"the parts' SHA-256 is {digest.hexdigest()}, not {sha256}")
        path = self.path(sha256)
        path.parent.mkdir(exist_ok=True)
        (folder / "whole").replace(path)
        shutil.rmtree(folder)

    def _upload(self, upload: str) -> Path:
        folder = self.uploads / upload
        if not upload.isalnum() or not folder.is_dir():
            raise Refused(404, f"no such upload: {upload}")
        return folder


class Repo:
    """One repository. Changes go through `Repos.lock`."""

    def __init__(self, folder: Path, kind: str, name: str, data: dict[str, Any]) -> None:
        self.folder, self.kind, self.name, self.data = folder, kind, name, data

    @property
    def private(self) -> bool:
        return bool(self.data["private"])

    @property
    def refs(self) -> dict[str, str]:
        return cast("dict[str, str]", self.data["refs"])

    def find(self, revision: str) -> str | None:
        """The commit a branch, tag, ref or commit id stands for."""
        for ref in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if ref in self.refs:
                return self.refs[ref]
        known = re.fullmatch(r"[0-9a-f]{40}", revision) and (self.folder / "commits" / f"{revision}.json").exists()
        return revision if known else None

    def ref(self, revision: str) -> str | None:
        """The ref a commit may move: a branch or a pull request."""
        return next((ref for ref in (f"refs/heads/{revision}", revision) if ref in self.refs), None)

    def commit(self, oid: str) -> Commit:
        return _commit_in(self.folder / "commits" / f"{oid}.json")

    def history(self, oid: str | None) -> Iterator[Commit]:
        """A commit and those before it, newest first."""
        while oid:
            commit = self.commit(oid)
            yield commit
            oid = commit.parent

    def add(self, ref: str, parent: str | None, tree: Tree, *, title: str, description: str, author: str) -> Commit:
        """A commit on a ref. Entries whose `commit` is empty are new in it."""
        facts = {"parent": parent, "title": title, "description": description, "author": author, "date": now()}
        oid = hashlib.sha1(json.dumps([facts, secrets.token_hex(8)]).encode(), usedforsecurity=False).hexdigest()
        tree = {path: {**tree[path], "commit": tree[path]["commit"] or oid} for path in sorted(tree)}
        data = json.dumps({"oid": oid, **facts, "tree": tree}).encode()
        replace_file(self.folder / "commits" / f"{oid}.json", data)
        self.refs[ref] = oid
        self.save()
        return self.commit(oid)

    def save(self) -> None:
        replace_file(self.folder / "repo.json", json.dumps(self.data).encode())

    def describe(self) -> dict[str, Any]:
        """Everything, oldest commit first: what tests look at."""
        commits: dict[str, Any] = {}
        for oid in self.refs.values():
            for commit in self.history(oid):
                files = {path: entry["sha256"] for path, entry in commit.tree.items()}
                facts = {
                    key: getattr(commit, key) for key in ("oid", "parent", "title", "description", "author", "date")
                }
                commits.setdefault(commit.oid, {**facts, "files": files})
        return {
            "private": self.private,
            "refs": self.refs,
            "commits": sorted(commits.values(), key=lambda one: one["date"]),
        }


class Repos:
    """All repositories of a loopback Hub."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "repos"
        self.folder.mkdir(exist_ok=True)
        self.lock = threading.RLock()

    def find(self, kind: str, name: str) -> Repo | None:
        folder = self._folder(kind, name)
        try:
            return Repo(folder, kind, name, json.loads((folder / "repo.json").read_bytes()))
        except FileNotFoundError:
            return None

    def again(self, repo: Repo) -> Repo:
        """As it is now: what was found before the lock was held may be out of date."""
        found = self.find(repo.kind, repo.name)
        if found is None:
            raise Refused(404, "Repository not found", "RepoNotFound")
        return found

    def create(self, kind: str, name: str, *, private: bool, author: str, tree: Tree) -> Repo:
        facts = {"private": private, "created": now(), "pulls": 0, "refs": {}}
        repo = Repo(self._folder(kind, name), kind, name, facts)
        repo.add(MAIN, None, tree, title="initial commit", description="", author=author)
        return repo

    def delete(self, repo: Repo) -> None:
        (repo.folder / "repo.json").unlink()
        shutil.rmtree(repo.folder)

    def all(self) -> Iterator[Repo]:
        for file in sorted(self.folder.glob("*/*/*/repo.json")):
            kind, namespace, name = file.parts[-4:-1]
            yield Repo(file.parent, kind, f"{namespace}/{name}", json.loads(file.read_bytes()))

    def _folder(self, kind: str, name: str) -> Path:
        if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", name) or ".." in name:
            raise Refused(400, f"invalid repository name: {name!r}")
        return self.folder / kind / name


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def entry_of(data: bytes, sha256: str) -> Entry:
    """A regular file's place in a tree."""
    return {"size": len(data), "oid": _git_oid(data), "sha256": sha256, "lfs": False, "commit": ""}


def lfs_entry_of(size: int, sha256: str) -> Entry:
    """A large file's: git sees the pointer, everybody else the content."""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    return {
        "size": size,
        "oid": _git_oid(pointer),
        "sha256": sha256,
        "lfs": True,
        "pointer": len(pointer),
        "commit": "",
    }


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@lru_cache(maxsize=8)
def _commit_in(file: Path) -> Commit:
    return Commit(**json.loads(file.read_bytes()))
