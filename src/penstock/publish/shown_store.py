"""What an S3-style store shows, for reading it back: objects under a prefix, by the digest that was put beside each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from penstock.publish.place import RemoteFile
from penstock.publish.retry import Patience
from penstock.publish.store import StorePlace


class StoreShown:
    """A prefix of a bucket as it is now."""

    revision = ""
    carded = False

    def __init__(self, to: str, *, patience: Patience | None = None) -> None:
        self._place = StorePlace(to, patience=patience)
        self.name = self._place.name
        self.files: Mapping[str, RemoteFile] = _Files(self._place)

    def stretch(self, path: str, offset: int, length: int) -> bytes:
        return b"".join(self._place.chunks(path, offset, length))

    def digest(self, path: str, passed: Callable[[int], None]) -> str:
        total = hashlib.sha256()
        for chunk in self._place.chunks(path, 0, self.files[path].size):
            total.update(chunk)
            passed(len(chunk))
        return total.hexdigest()

    def local(self, path: str) -> Path | None:
        return None


class _Files(Mapping[str, RemoteFile]):
    """The objects of a prefix. A digest is asked for when it is looked at: there may be much else beside a dataset."""

    def __init__(self, place: StorePlace) -> None:
        self._place = place
        self._sizes = dict(place.sizes())

    def __getitem__(self, path: str) -> RemoteFile:
        return RemoteFile(self._sizes[path], self._place.stated_digest(path), "")

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, path: object) -> bool:
        return path in self._sizes
