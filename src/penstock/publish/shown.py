"""What a place shows, for reading it back: its files with their sizes, stretches of them, and their digests.

A folder and a Hub repository at one commit look the same from here, so they are verified the same way.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import BadFile, NotFound, UsageError
from penstock.publish.place import RemoteFile
from penstock.publish.retry import Patience, patiently

BUFFER = 1 << 20


class Shown(Protocol):
    """A place as it is now."""

    @property
    def name(self) -> str:
        """As a user writes it."""

    @property
    def revision(self) -> str:
        """The commit, where there are commits."""

    @property
    def files(self) -> Mapping[str, RemoteFile]:
        """Every file, hidden ones too."""

    @property
    def carded(self) -> bool:
        """Whether a card names the files of splits; else they are told by their own names."""

    def stretch(self, path: str, offset: int, length: int) -> bytes:
        """A range of a file."""

    def digest(self, path: str, passed: Callable[[int], None]) -> str:
        """The SHA-256 of a file that is read to its end, a buffer at a time."""

    def local(self, path: str) -> Path | None:
        """Where a file lies on this machine, if it does."""


class FolderShown:
    """A folder. Its digests are only known by reading it."""

    revision = ""
    carded = True

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise NotFound("there is no such folder", where=str(folder))
        self.name, self._folder = str(folder), folder
        self.files = dict(self._listed())

    def _listed(self) -> Iterator[tuple[str, RemoteFile]]:
        for above, folders, names in os.walk(self._folder, followlinks=True):
            folders.sort()
            for name in sorted(names):
                path = Path(above, name)
                try:
                    size = path.stat().st_size
                except OSError:
                    continue  # a link into nothing: as good as missing
                yield path.relative_to(self._folder).as_posix(), RemoteFile(size, None, "")

    def stretch(self, path: str, offset: int, length: int) -> bytes:
        with self._opened(path) as file:
            file.seek(offset)
            return bytes(file.read(length))

    def digest(self, path: str, passed: Callable[[int], None]) -> str:
        total, buffer = hashlib.sha256(), memoryview(bytearray(BUFFER))
        with self._opened(path) as file:
            while got := file.readinto(buffer):
                total.update(buffer[:got])
                passed(got)
            if sys.platform == "linux":  # the page cache belongs to the user
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return total.hexdigest()

    def local(self, path: str) -> Path | None:
        return self._folder / path

    def _opened(self, path: str) -> Any:
        try:
            return open(self._folder / path, "rb", buffering=0)
        except OSError as error:
            raise BadFile(f"cannot be read ({error.strerror})", where=path) from error


class HubShown:
    """A dataset repository at one commit: the one its revision names when this is made."""

    carded = True

    def __init__(
        self, repo_id: str, *, revision: str | None, token: str | None, endpoint: str | None, patience: Patience | None
    ) -> None:
        from penstock.publish.hub import HubPlace

        place = HubPlace(repo_id, token=token, revision=revision, endpoint=endpoint, patience=patience)
        look = place.look()
        if not look.exists:
            raise NotFound(
                "there is no such folder, and no such dataset repository that may be seen from here",
                where=repo_id,
                do="check the name; a private repository needs a token (hf auth login, HF_TOKEN or --token)",
            )
        if look.head is None:
            raise NotFound(f"there is no revision {revision!r}", where=repo_id)
        self.name, self.revision, self.files = repo_id, look.head, dict(look.files or {})
        self._token, self._endpoint, self._patience = token, place.endpoint, place.patience

    def stretch(self, path: str, offset: int, length: int) -> bytes:
        got = bytearray()

        def read() -> None:
            for chunk in self._chunks(path, offset + len(got), offset + length):
                got.extend(chunk)
            if len(got) < length:
                raise ConnectionError(f"{path} ended early")

        self._patiently(path, read)
        return bytes(got)

    def digest(self, path: str, passed: Callable[[int], None]) -> str:
        total, size, done = hashlib.sha256(), self.files[path].size, 0

        def read() -> None:
            nonlocal done
            for chunk in self._chunks(path, done, size):
                total.update(chunk)
                done += len(chunk)
                passed(len(chunk))
            if done < size:
                raise ConnectionError(f"{path} ended early")

        self._patiently(path, read)
        return total.hexdigest()

    def local(self, path: str) -> Path | None:
        return None

    def _patiently(self, path: str, read: Callable[[], None]) -> None:
        patiently(read, what=f"reading {path}", where=self.name, patience=self._patience)

    def _chunks(self, path: str, offset: int, end: int) -> Iterator[bytes]:
        """A range as it comes over the wire. A server that knows no ranges sends the file from its start."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import hf_raise_for_status

        if offset >= end:
            return
        url = hf_hub_url(self.name, path, repo_type="dataset", revision=self.revision, endpoint=self._endpoint)
        headers = {
            **build_hf_headers(token=self._token, library_name="penstock"),
            "Range": f"bytes={offset}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=60) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            ahead = 0 if response.status_code == 206 else offset
            left = end - offset
            for chunk in response.iter_bytes(BUFFER):
                if ahead >= len(chunk):
                    ahead -= len(chunk)
                    continue
                wanted = chunk[ahead : ahead + left]
                ahead, left = 0, left - len(wanted)
                yield wanted
                if not left:
                    return


def shown_at(
    target: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    patience: Patience | None = None,
) -> Shown:
    """The place a name stands for: a folder that is there, an S3-style store, or a repository of the Hub."""
    if isinstance(target, str) and target.startswith("s3://"):
        from penstock.publish.shown_store import StoreShown

        if revision is not None:
            raise UsageError("a store has no revisions", where=target, do="leave out --revision")
        return StoreShown(target, patience=patience)
    name = os.fspath(target).removeprefix("file://")
    folder = Path(name).expanduser()
    if folder.is_dir() or name.startswith((".", "/", "~")) or not isinstance(target, str):
        if revision is not None:
            raise UsageError("a folder has no revisions", where=name, do="leave out --revision")
        return FolderShown(folder)
    if "://" in name:
        raise UsageError("is no place that can be verified", where=name, do="name a folder or ORG/NAME")
    return HubShown(name, revision=revision, token=token, endpoint=endpoint, patience=patience)
