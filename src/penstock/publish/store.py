"""An S3-style store as a place to publish to, through boto3: "s3://bucket/prefix".

Content goes first as multipart uploads that are not completed, so nobody sees it. Then all of them are completed and
the receipt is put last: who goes by the receipt sees the old state or the new one, never a mixture. What the new state
replaces goes after that. The store checks every part as it comes (Content-MD5), and the whole is held against its
SHA-256 as it is read: what a killed push had sent is not sent again, and not trusted unread.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from io import BufferedIOBase
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import NotAllowed, NotFound, PenstockError, RemoteFailed, SourceChanged, UsageError
from penstock.publish.last import listed_by, receipts
from penstock.publish.place import Look, Notes, Published, Sealed, Sent, Streams, Wish
from penstock.publish.retry import Patience, patiently

if TYPE_CHECKING:
    from penstock.journal import Journal, Record
    from penstock.publish.card import Card

T = TypeVar("T")

PART = 8 << 20  # held in memory, one for each upload under way; S3's least is 5 MiB
MOST_PARTS = 10_000  # S3's own limit: very large shards have larger parts
COMPLETIONS = 8  # at once, so that the time in which a lister sees some shards and not others is short
THERE = "there"  # the mode of content that the store had, visible, before anything was sent
RECEIPTS = ".penstock/"
_REFUSED = frozenset({"AccessDenied", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "401",
                      "SignatureDoesNotMatch", "TokenRefreshRequired", "RequestTimeTooSkewed", "403"})  # fmt: skip
_ELSEWHERE = frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
_NO_KEY = frozenset({"NoSuchKey", "NotFound", "404"})


class StorePlace:
    """A bucket, and a prefix in it."""

    visible = "at once for who goes by the receipt, which is put last"

    def __init__(self, to: str, *, patience: Patience | None = None, stopped: threading.Event | None = None) -> None:
        bucket, _, prefix = to.removeprefix("s3://").partition("/")
        if not bucket:
            raise UsageError("names no bucket", where=to, do="name it s3://BUCKET/PREFIX")
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError:
            raise UsageError(
                "publishing to a store needs boto3", where=to, do="install it: pip install 'penstock[s3]'"
            ) from None
        self.bucket, self.prefix = bucket, prefix.strip("/")
        self.patience = patience or Patience()
        self.stopped = stopped or threading.Event()
        # Attempts are counted in one place, `patiently`. Checksums that follow the body are not understood by every
        # store that speaks S3; Content-MD5 is.
        config = Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=20,
            read_timeout=120,
            max_pool_connections=COMPLETIONS + 2,
            user_agent_extra="penstock",
        )
        try:
            session = boto3.session.Session()
            self._credentials = session.get_credentials()
            self._client: Any = session.client("s3", config=config)
        except (BotoCoreError, ValueError) as error:
            raise UsageError(f"the settings of S3 do not hold ({error})", where=to, do="mend them") from error

    @property
    def name(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def title(self) -> str:
        return self.name

    def describe(self) -> dict[str, Any]:
        return {"to": self.name, "at": self.endpoint}

    @property
    def endpoint(self) -> str:
        return str(self._client.meta.endpoint_url)

    def address(self) -> str:
        return self.name if ".amazonaws." in self.endpoint else f"{self.name} at {self.endpoint}"

    def state(self, look: Look) -> str:
        return "the bucket exists, and may be written to"

    def shard_path(self, folder: str, split: str, at: int, sha256: str) -> str:
        return f"{folder}/{split}-{at:05d}-{sha256[:12]}.parquet"

    # -- before any work ------------------------------------------------------------------------------------------

    def check(self, sources: Iterable[str] = ()) -> Look:
        """Say now what would stop the push later: everything it will need but deleting is tried, and leaves nothing."""
        if self._credentials is None:
            raise self._refused("there are no credentials for it")
        probe = self._key(f"{RECEIPTS}probe")
        begun = self._ask("beginning an upload", self._client.create_multipart_upload, Key=probe)
        try:
            self._ask("listing parts", self._client.list_parts, Key=probe, UploadId=begun["UploadId"])
        finally:
            self._abort(probe, begun["UploadId"])
        self._head(f"{RECEIPTS}probe")
        return Look(exists=True)

    def prepare(self, look: Look, journal: Journal) -> None:
        """Nothing: a bucket has an owner, a region and a bill, and is made by whoever has all three."""

    # -- content, invisible ---------------------------------------------------------------------------------------

    def send(self, sealed: Sealed, stream: Callable[[], BufferedIOBase], notes: Notes) -> str:
        """Upload content and do not complete it; the upload's id. Parts that are there are read, and not sent again."""
        if self._is_there(sealed):
            return THERE
        size = part_size(sealed.size)
        upload, there = self._begun(sealed, size, notes)
        key, whole = self._key(sealed.path), hashlib.sha256()
        buffer = memoryview(bytearray(min(size, sealed.size)))
        with stream() as opened:
            for number in range(1, max(1, -(-sealed.size // size)) + 1):
                if self.stopped.is_set():
                    raise RemoteFailed("sending was stopped", where=sealed.path)
                part = buffer[: _filled(opened, buffer)]
                whole.update(part)
                md5 = hashlib.md5(part, usedforsecurity=False)
                noted = notes.get(f"part/{number}") or {}
                if (found := there.get(number)) is not None and found[0] == len(part):
                    had = {"upload": upload, "number": number, "md5": md5.hexdigest(), "tag": found[1]}
                    if all(noted.get(name) == value for name, value in had.items()):
                        continue
                    # It came, and its journal entry did not. A tag is the MD5, unless the store encrypts by a key of
                    # the user's.
                    if found[1] == md5.hexdigest():
                        notes.put(f"part/{number}", had)
                        continue
                answer = self._ask(
                    f"sending part {number} of {sealed.path}",
                    self._client.upload_part,
                    Key=key,
                    UploadId=upload,
                    PartNumber=number,
                    Body=part.obj if len(part) == len(buffer) else bytes(part),
                    ContentMD5=base64.b64encode(md5.digest()).decode(),
                )
                made = {"upload": upload, "number": number, "md5": md5.hexdigest(), "tag": _tag(answer)}
                notes.put(f"part/{number}", made)
        if whole.hexdigest() != sealed.sha256:
            self._abort(key, upload)
            raise SourceChanged(
                "a source of it is not what was hashed before",
                where=sealed.path,
                do="put it back as it was, or pass --restart (restart=True)",
            )
        return upload

    def _begun(self, sealed: Sealed, size: int, notes: Notes) -> tuple[str, dict[int, tuple[int, str]]]:
        """The upload that an earlier run began for this, and its parts' sizes and tags; else a new one."""
        noted = notes.get("upload")
        if noted is not None:
            parts = self._parts(self._key(noted["path"]), noted["id"])
            if parts is not None and (noted["path"], noted["part"]) == (sealed.path, size):
                return str(noted["id"]), parts
            if parts is not None:  # cut otherwise, by another version of this program
                self._abort(self._key(noted["path"]), noted["id"])
        # Should the answer be lost, the store is left with an upload that has no parts and costs nothing.
        begun = self._ask(
            f"beginning {sealed.path}",
            self._client.create_multipart_upload,
            Key=self._key(sealed.path),
            Metadata={"sha256": sealed.sha256},
        )
        notes.put("upload", {"id": begun["UploadId"], "path": sealed.path, "part": size})
        return str(begun["UploadId"]), {}

    def _parts(self, key: str, upload: str) -> dict[int, tuple[int, str]] | None:
        """What the store has of an upload; None where it has dropped it."""
        found: dict[int, tuple[int, str]] = {}
        after: dict[str, Any] = {}
        while True:
            try:
                page = self._ask("listing parts", self._client.list_parts, Key=key, UploadId=upload, **after)
            except _NoUpload:
                return None
            found |= {one["PartNumber"]: (one["Size"], _tag(one)) for one in page.get("Parts", ())}
            if not page.get("IsTruncated"):
                return found
            after = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def present(self, content: Sequence[Sealed]) -> list[bool]:
        """Uploads that are still there, or were completed already by a push that was killed in the midst of it."""

        def ask(one: Sealed) -> bool:
            if one.mode != THERE and self._parts(self._key(one.path), one.mode) is not None:
                return True
            return self._is_there(one)

        return self._each(ask, content)

    def holds(self, files: Sequence[Sealed]) -> bool:
        return all(self._each(self._is_there, files))

    def discard(self, records: Mapping[str, Record]) -> None:
        for key, record in records.items():
            if key.startswith("task/upload/"):
                self._abort(self._key(record["path"]), record["id"])

    # -- visible --------------------------------------------------------------------------------------------------

    def at_work(self) -> AbstractContextManager[None]:
        return nullcontext()

    def publish(self, sent: Sequence[Sent], wish: Wish, journal: Journal, streams: Streams, fresh: Card) -> Published:
        """Complete everything, then put the receipts, then take away what they replace."""
        files = [one for split in sent for one in split.files]
        texts = receipts(wish, sent)
        tags: dict[str, dict[int, str]] = {}
        for key, record in journal.records.items():
            if key.startswith("task/part/"):
                tags.setdefault(record["upload"], {})[record["number"]] = record["tag"]
        self._each(lambda one: self._complete(one, tags.get(one.mode, {})), files)
        # Once the receipts are put nothing else tells what was there before: a push that is killed then finds it here.
        gone = set(journal.records.get("gone", {}).get("paths", ()))
        listed = {path for receipt in texts for path in listed_by(self.read(receipt))}
        gone = (gone | listed) - {one.path for one in files}
        journal.commit("gone", {"paths": sorted(gone)})
        for path, text in texts.items():
            data = text.encode()
            if self.read(path) != data:
                self._ask(
                    f"putting {path}",
                    self._client.put_object,
                    Key=self._key(path),
                    Body=data,
                    ContentType="application/json",
                    ContentMD5=base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode(),
                )
        self._delete(sorted(gone - self._named_elsewhere(texts)) if gone else ())
        return Published()

    def read(self, path: str, *, revision: str | None = None) -> bytes | None:
        """A small object as it is there now; None where there is none."""

        def get(**words: Any) -> bytes:
            return bytes(self._client.get_object(**words)["Body"].read())

        try:
            return self._ask(f"reading {path}", get, Key=self._key(path))
        except _NoKey:
            return None

    def sizes(self, under: str = "") -> Iterator[tuple[str, int]]:
        """The objects under a path, and their sizes."""
        words: dict[str, Any] = {"Prefix": self._key(under)}
        while True:
            page = self._ask("listing objects", self._client.list_objects_v2, **words)
            for one in page.get("Contents", ()):
                yield str(one["Key"]).removeprefix(self._key("")), int(one["Size"])
            if not page.get("IsTruncated"):
                return
            words["ContinuationToken"] = page["NextContinuationToken"]

    def stated_digest(self, path: str) -> str | None:
        """The SHA-256 that was put beside an object when its upload began."""
        found = (self._head(path) or {}).get("Metadata", {}).get("sha256")
        return None if found is None else str(found)

    def chunks(self, path: str, offset: int, length: int) -> Iterator[bytes]:
        """A range of an object, a part's worth at a time."""
        end = offset + length

        def get(**words: Any) -> bytes:
            got = bytes(self._client.get_object(**words)["Body"].read())
            if len(got) != upto - offset:
                raise ConnectionError(f"{path} ended early")
            return got

        while offset < end:
            upto = min(end, offset + PART)
            yield self._ask(f"reading {path}", get, Key=self._key(path), Range=f"bytes={offset}-{upto - 1}")
            offset = upto

    def _complete(self, sealed: Sealed, tags: Mapping[int, str]) -> None:
        """Make one object visible, unless it is."""
        lost = RemoteFailed(
            "the store has dropped it since it was sent", where=sealed.path, do="run again: it is sent anew"
        )
        if sealed.mode == THERE:
            if not self._is_there(sealed):
                raise lost
            return
        parts = [{"PartNumber": number, "ETag": f'"{tag}"'} for number, tag in sorted(tags.items())]
        try:
            self._ask(
                f"completing {sealed.path}",
                self._client.complete_multipart_upload,
                before_again=lambda: {} if self._is_there(sealed) else None,
                Key=self._key(sealed.path),
                UploadId=sealed.mode,
                MultipartUpload={"Parts": parts},
            )
        except _NoUpload:
            if not self._is_there(sealed):
                raise lost from None

    def _named_elsewhere(self, own: Iterable[str]) -> set[str]:
        """Files that the receipts of other splits list: what goes with a dataset may go with several."""
        others = {path for path, _ in self.sizes(RECEIPTS)} - set(own)
        return {path for receipt in others for path in listed_by(self.read(receipt))}

    def _delete(self, paths: Sequence[str]) -> None:
        # One by one: deleting many at once needs a checksum that not every store has.
        self._each(lambda path: self._ask(f"deleting {path}", self._client.delete_object, Key=self._key(path)), paths)

    # -- requests -------------------------------------------------------------------------------------------------

    def _key(self, path: str) -> str:
        return f"{self.prefix}/{path}" if self.prefix else path

    def _is_there(self, sealed: Sealed) -> bool:
        """Whether an object is visible and is this: its digest was put beside it when its upload began."""
        found = self._head(sealed.path)
        return (
            found is not None
            and found["ContentLength"] == sealed.size
            and found.get("Metadata", {}).get("sha256") == sealed.sha256
        )

    def _head(self, path: str) -> dict[str, Any] | None:
        try:
            return dict(self._ask(f"looking at {path}", self._client.head_object, Key=self._key(path)))
        except _NoKey:
            return None

    def _abort(self, key: str, upload: str) -> None:
        with suppress(_NoUpload):
            self._ask("taking an upload back", self._client.abort_multipart_upload, Key=key, UploadId=upload)

    def _each(self, work: Callable[[Any], T], things: Sequence[Any]) -> list[T]:
        if len(things) < 2:
            return [work(one) for one in things]
        with ThreadPoolExecutor(COMPLETIONS, thread_name_prefix="store") as threads:
            return list(threads.map(work, things))

    def _ask(
        self,
        what: str,
        call: Callable[..., T],
        *,
        before_again: Callable[[], T | None] = lambda: None,
        **words: Any,
    ) -> T:
        def made() -> T:
            try:
                return call(Bucket=self.bucket, **words)
            except Exception as error:
                if (typed := self._typed(error, what)) is not None:
                    raise typed from error
                raise

        return patiently(
            made,
            what=what,
            where=self.name,
            patience=self.patience,
            stopped=self.stopped,
            before_again=before_again,
        )

    def _typed(self, error: Exception, what: str) -> PenstockError | None:
        """What no further attempt would change, in words; None for the rest."""
        from botocore import exceptions as boto

        if isinstance(error, boto.ParamValidationError):
            return UsageError(f"is not a name S3 takes ({error})", where=self.name, do="name it s3://BUCKET/PREFIX")
        if isinstance(
            error,
            boto.NoCredentialsError
            | boto.PartialCredentialsError
            | boto.CredentialRetrievalError
            | boto.TokenRetrievalError
            | boto.SSOError,
        ):
            return self._refused(f"its credentials cannot be had ({error})")
        if not isinstance(error, boto.ClientError):
            return None
        code, said = str(error.response["Error"]["Code"]), str(error.response["Error"].get("Message", ""))
        if code == "NoSuchUpload":
            return _NoUpload("there is no such upload", where=self.name)
        if code in _NO_KEY:
            return _NoKey("there is no such object", where=self.name)
        if code == "NoSuchBucket":
            return NotFound(
                f"there is no bucket {self.bucket!r} at {self.endpoint}",
                where=self.name,
                do="make it, or check its name, AWS_ENDPOINT_URL and the region",
            )
        if code in _ELSEWHERE:
            return UsageError(
                f"the bucket is in another region ({said})", where=self.name, do="set AWS_DEFAULT_REGION to it"
            )
        if code in _REFUSED:
            return self._refused(f"{what} was refused ({code}{': ' + said if said else ''})")
        return None

    def _refused(self, what: str) -> NotAllowed:
        return NotAllowed(
            what,
            where=self.name,
            do="give credentials that may write and read there, as the AWS tools take them (AWS_PROFILE,"
            " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), and run the same command again: what was sent stays",
        )


class _NoKey(RemoteFailed):
    """There is no such object."""


class _NoUpload(RemoteFailed):
    """There is no such upload: completed, taken back, or dropped by a rule of the bucket."""


def part_size(size: int) -> int:
    """Bytes of a part: few enough to hold, and not more of them than a store takes.

    >>> part_size(500_000_000) == PART, part_size(200 << 30) >> 20
    (True, 21)
    """
    least = -(-size // MOST_PARTS)
    return max(PART, -(-least // (1 << 20)) << 20)


def _tag(answer: Mapping[str, Any]) -> str:
    return str(answer["ETag"]).strip('"')


def _filled(opened: BufferedIOBase, buffer: memoryview) -> int:
    """Read until a buffer is full or the stream is at its end."""
    at = 0
    while at < len(buffer) and (count := opened.readinto(buffer[at:])):
        at += count
    return at
