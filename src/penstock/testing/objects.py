"""What a loopback S3 store holds, in a folder: buckets with objects, and multipart uploads under way.

    buckets/<bucket>/data/<random>               content, named by whichever key file points at it
    buckets/<bucket>/keys/<SHA-256 of key>.json  key, data, size, etag, sha256, modified, type, metadata
    buckets/<bucket>/uploads/<id>/upload.json    key, started, and what is to be kept with the object
    buckets/<bucket>/uploads/<id>/<n>-<md5>-<size>

An object is visible from the moment its key file is renamed into place: whole, or as it was before.
"""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.testing.wire import Refused, read_in_buffers, replace_file, write_all


@dataclass(frozen=True)
class Kept:
    """What a client wants remembered with an object."""

    type: str
    metadata: dict[str, str]


@dataclass(frozen=True)
class Stored:
    """An object's entry in the index."""

    key: str
    data: str
    size: int
    etag: str
    sha256: str
    modified: str
    type: str
    metadata: dict[str, str]


@dataclass(frozen=True)
class Received:
    """A body that was written to a file."""

    path: Path
    size: int
    md5: str
    sha256: str


@dataclass(frozen=True)
class Part:
    number: int
    md5: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.number}-{self.md5}-{self.size}"


class Bucket:
    """One bucket. Its index is in memory, in the order of its keys' bytes on request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        for name in ("keys", "data", "uploads"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for left in folder.glob("data/.*"):  # what a killed server was receiving
            left.unlink()
        stored = [Stored(**json.loads(file.read_bytes())) for file in folder.glob("keys/*.json")]
        self._index = {one.key: one for one in stored}

    def find(self, key: str) -> Stored | None:
        return self._index.get(key)

    def all(self) -> list[Stored]:
        with self.lock:
            return [self._index[key] for key in sorted(self._index)]

    def data(self, stored: Stored) -> Path:
        return self.folder / "data" / stored.data

    def receive(self, body: io.RawIOBase, check: Callable[[Received], None], *, upload: str | None = None) -> Received:
        """Store a body under a name nobody asks for yet; it goes again when `check` refuses it."""
        path = (self.upload(upload) if upload else self.folder / "data") / f".{secrets.token_hex(16)}"
        size, md5, sha256 = 0, hashlib.md5(usedforsecurity=False), hashlib.sha256()
        try:
            with path.open("xb", buffering=0) as out:
                for piece in read_in_buffers(body):
                    md5.update(piece)
                    sha256.update(piece)
                    write_all(out.fileno(), piece)
                    size += len(piece)
            received = Received(path, size, md5.hexdigest(), sha256.hexdigest())
            check(received)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return received

    def show(self, key: str, received: Received, kept: Kept, *, etag: str, only_new: bool) -> Stored:
        """Make an object visible: the one moment from which it is there."""
        data = received.path.with_name(received.path.name.lstrip("."))
        facts = {"key": key, "data": data.name, "size": received.size, "etag": etag, "sha256": received.sha256}
        stored = Stored(**facts, modified=now(), **asdict(kept))  # type: ignore[arg-type]
        with self.lock:
            old = self._index.get(key)
            if old and only_new:
                received.path.unlink()
                raise Refused(412, "At least one of the preconditions did not hold", "PreconditionFailed")
            received.path.replace(data)
            replace_file(self._key_file(key), json.dumps(asdict(stored)).encode())
            self._index[key] = stored
        if old:
            self.data(old).unlink(missing_ok=True)
        return stored

    def forget(self, key: str) -> None:
        with self.lock:
            stored = self._index.pop(key, None)
            self._key_file(key).unlink(missing_ok=True)
        if stored:
            self.data(stored).unlink(missing_ok=True)

    # --- multipart uploads

    def start(self, key: str, kept: Kept) -> str:
        upload = secrets.token_hex(16)
        facts = {"id": upload, "key": key, "started": now(), "kept": asdict(kept)}
        replace_file(self.folder / "uploads" / upload / "upload.json", json.dumps(facts).encode())
        return upload

    def upload(self, upload: str) -> Path:
        folder = self.folder / "uploads" / upload
        if not upload.isalnum() or not (folder / "upload.json").exists():
            raise Refused(404, "The specified upload does not exist", "NoSuchUpload")
        return folder

    def uploads(self) -> list[dict[str, Any]]:
        found = []
        for file in self.folder.glob("uploads/*/upload.json"):
            with suppress(FileNotFoundError):  # completed or aborted since it was listed
                found.append(json.loads(file.read_bytes()))
        return sorted(found, key=lambda one: (one["key"], one["started"]))

    def parts(self, upload: str) -> dict[int, Part]:
        names = [file.name.split("-") for file in self.upload(upload).glob("[1-9]*-*-*")]
        return {int(number): Part(int(number), md5, int(size)) for number, md5, size in names}

    def add_part(self, upload: str, number: int, received: Received) -> Part:
        part = Part(number, received.md5, received.size)
        with self.lock:
            old = self.parts(upload).get(number)
            received.path.replace(received.path.with_name(part.name))
            if old and old != part:
                received.path.with_name(old.name).unlink()
        return part

    def complete(self, key: str, upload: str, wanted: Sequence[Part], *, only_new: bool) -> Stored:
        """Parts become an object; its tag is S3's: the MD5 of the parts' MD5s and their number."""
        folder = self.upload(upload)
        whole, size, digest = self.folder / "data" / f".{secrets.token_hex(16)}", 0, hashlib.sha256()
        with whole.open("xb", buffering=0) as out:
            for part in wanted:
                with (folder / part.name).open("rb", buffering=0) as file:
                    for piece in read_in_buffers(file):
                        digest.update(piece)
                        write_all(out.fileno(), piece)
                        size += len(piece)
        tags = hashlib.md5(b"".join(bytes.fromhex(part.md5) for part in wanted), usedforsecurity=False).hexdigest()
        kept = Kept(**json.loads((folder / "upload.json").read_bytes())["kept"])
        received = Received(whole, size, tags, digest.hexdigest())
        stored = self.show(key, received, kept, etag=f"{tags}-{len(wanted)}", only_new=only_new)
        shutil.rmtree(folder)
        return stored

    def abort(self, upload: str) -> None:
        shutil.rmtree(self.upload(upload))

    def _key_file(self, key: str) -> Path:
        return self.folder / "keys" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
