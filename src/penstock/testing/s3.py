"""An S3-style store on 127.0.0.1 for boto3 and its like: path-style buckets, objects, multipart uploads.

An object is there whole or not at all, and a multipart upload only once it is completed. Access keys are checked,
signatures are not.

    with LoopbackS3() as s3:
        subprocess.run(["penstock", "push", ...], env=os.environ | s3.env())

As a process of its own: `python -m penstock.testing.s3 --folder F --port P`, which prints its URL first.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from penstock.testing.faults import Faults
from penstock.testing.objects import Bucket, Kept, Part, Received
from penstock.testing.server import Control, Process, Server, command_line, options, serve_until_ended
from penstock.testing.wire import BUFFER, Answer, Body, Chunked, Refused, Request, file_answer

KEYS = {"penstock": "penstock-secret"}  # access key -> secret key
MIN_PART = 5 << 20  # S3's own: every part but the last has at least this
PAGE = 1000
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_WORDS = {404: "NoSuchKey", 412: "PreconditionFailed", 429: "SlowDown", 500: "InternalError", 503: "SlowDown"}

Xml = Sequence[tuple[str, Any]]  # names and their text, or further names


class S3Control(Control):
    """What can be asked of a loopback store, in this process or another."""

    keys: Mapping[str, str]

    def env(self) -> dict[str, str]:
        """The variables that turn a client process to this store."""
        key, secret = next(iter(self.keys.items()))
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def objects(self, bucket: str) -> dict[str, dict[str, Any]]:
        """A bucket's objects: key -> size, etag, sha256."""
        return dict(self.state()["buckets"].get(bucket, {"objects": {}})["objects"])

    def uploads(self, bucket: str) -> list[dict[str, Any]]:
        """Multipart uploads neither completed nor aborted: key, id, parts."""
        return list(self.state()["buckets"].get(bucket, {"uploads": []})["uploads"])


class LoopbackS3(Server, S3Control):
    """A store in a thread of this process.

    Every part of an upload but the last must have `min_part` bytes; listings give `page` keys at a time.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        keys: Mapping[str, str] = KEYS,
        faults: Faults | None = None,
        min_part: int = MIN_PART,
        page: int = PAGE,
        port: int = 0,
    ) -> None:
        super().__init__(folder, faults=faults, port=port)
        self.keys, self.min_part, self.page = keys, min_part, page
        self._buckets = {path.name: Bucket(path) for path in sorted((self.folder / "buckets").glob("*"))}

    @staticmethod
    def start_process(
        folder: Path,
        *,
        keys: Mapping[str, str] = KEYS,
        faults: Faults | None = None,
        min_part: int = MIN_PART,
        page: int = PAGE,
        port: int = 0,
    ) -> S3Process:
        """The same in a process of its own, for tests that limit or kill this one."""
        given = options(folder=folder, port=port, faults=faults, keys=keys, min_part=min_part, page=page)
        return S3Process(folder, keys, given)

    def answer(self, request: Request) -> Answer:
        asking = _access_key(request)
        if asking not in self.keys:
            what = (
                ("The access key is not known", "InvalidAccessKeyId") if asking else ("Access Denied", "AccessDenied")
            )
            raise Refused(403, *what)
        name, _, key = request.path.lstrip("/").partition("/")
        name, key = unquote(name), unquote(key)
        if not name:
            listed = [("Bucket", [("Name", known)]) for known in self._buckets]
            return _xml("ListAllMyBucketsResult", [("Buckets", listed)])
        if request.method == "PUT" and not key:
            return self._create(name)
        if name not in self._buckets:
            raise Refused(404, f"The bucket {name} does not exist", "NoSuchBucket")
        bucket = self._buckets[name]
        return self._on_object(request, bucket, key) if key else self._on_bucket(request, bucket)

    def refusal(self, refused: Refused) -> Answer:
        code = refused.code or _WORDS.get(refused.status, "InvalidRequest")
        return _xml("Error", [("Code", code), ("Message", refused.message), ("RequestId", "1")], status=refused.status)

    def who(self, request: Request) -> str | None:
        key = _access_key(request)
        return key if key in self.keys else None

    def describe(self) -> dict[str, Any]:
        return {"buckets": {name: _describe(bucket) for name, bucket in self._buckets.items()}}

    # --- buckets

    def _create(self, name: str) -> Answer:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", name):
            raise Refused(400, f"The bucket name {name} is not valid", "InvalidBucketName")
        if name in self._buckets:
            raise Refused(409, "You already own this bucket", "BucketAlreadyOwnedByYou")
        self._buckets[name] = Bucket(self.folder / "buckets" / name)
        return Answer(200, b"", {"Location": f"/{name}"})

    def _on_bucket(self, request: Request, bucket: Bucket) -> Answer:
        match request.method:
            case "HEAD":
                return Answer(200, b"", {"x-amz-bucket-region": "us-east-1"})
            case "GET" if "location" in request.query:
                return _xml("LocationConstraint", [])
            case "GET" if "uploads" in request.query:
                return self._list_uploads(request, bucket)
            case "GET" if request.query.get("list-type") == "2":
                return self._list(request, bucket)
            case "POST" if "delete" in request.query:
                return self._delete_many(request, bucket)
        raise Refused(501, f"Not served here: {request.method} {request.target}", "NotImplemented")

    def _list(self, request: Request, bucket: Bucket) -> Answer:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = unquote(query.get("continuation-token", "")) or query.get("start-after", "")
        most = min(int(query.get("max-keys", self.page)), self.page)
        written = quote if query.get("encoding-type") == "url" else str
        shown: dict[str, tuple[str, Xml]] = {}
        more = False
        for one in bucket.all():
            if not one.key.startswith(prefix):
                continue
            inner, found, _ = one.key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            name = prefix + inner + found if found else one.key
            if name <= after or name in shown:
                continue
            if len(shown) == most:
                more = True
                break
            facts = [("Key", written(one.key)), ("LastModified", one.modified), ("ETag", f'"{one.etag}"')]
            facts += [("Size", str(one.size)), ("StorageClass", "STANDARD")]
            shown[name] = ("CommonPrefixes", [("Prefix", written(name))]) if found else ("Contents", facts)
        top = [("Name", bucket.folder.name), ("Prefix", written(prefix)), ("KeyCount", str(len(shown)))]
        top += [("MaxKeys", str(most)), ("IsTruncated", "true" if more else "false")]
        top += [("EncodingType", "url")] if written is quote else []
        top += [("NextContinuationToken", quote(max(shown)))] if more else []
        return _xml("ListBucketResult", [*top, *shown.values()])

    def _list_uploads(self, request: Request, bucket: Bucket) -> Answer:
        prefix = request.query.get("prefix", "")
        listed = [
            ("Upload", [("Key", one["key"]), ("UploadId", one["id"]), ("Initiated", one["started"])])
            for one in bucket.uploads()
            if one["key"].startswith(prefix)
        ]
        top = [("Bucket", bucket.folder.name), ("Prefix", prefix), ("IsTruncated", "false")]
        return _xml("ListMultipartUploadsResult", [*top, *listed])

    def _delete_many(self, request: Request, bucket: Bucket) -> Answer:
        asked = _parse(request)
        keys = [one.findtext("Key") or "" for one in asked.iter("Object")]
        for key in keys:
            bucket.forget(key)
        quiet = asked.findtext("Quiet") == "true"
        return _xml("DeleteResult", [] if quiet else [("Deleted", [("Key", key)]) for key in keys])

    # --- objects

    def _on_object(self, request: Request, bucket: Bucket, key: str) -> Answer:
        upload = request.query.get("uploadId")
        if "x-amz-copy-source" in request.headers:
            raise Refused(501, "Copies are not served here", "NotImplemented")
        match request.method:
            case "PUT" if upload:
                bucket.upload(upload)
                received = bucket.receive(_content(request), lambda got: _check(request, got), upload=upload)
                part = bucket.add_part(upload, int(request.query["partNumber"]), received)
                return Answer(200, b"", {"ETag": f'"{part.md5}"'})
            case "PUT":
                received = bucket.receive(_content(request), lambda got: _check(request, got))
                bucket.show(key, received, _kept(request), etag=received.md5, only_new=_only_new(request))
                return Answer(200, b"", {"ETag": f'"{received.md5}"'})
            case "POST" if "uploads" in request.query:
                started = [
                    ("Bucket", bucket.folder.name),
                    ("Key", key),
                    ("UploadId", bucket.start(key, _kept(request))),
                ]
                return _xml("InitiateMultipartUploadResult", started)
            case "POST" if upload:
                return self._complete(request, bucket, key, upload)
            case "DELETE":
                bucket.abort(upload) if upload else bucket.forget(key)
                return Answer(204)
            case "GET" if upload:
                return self._list_parts(request, bucket, key, upload)
            case "GET" | "HEAD":
                return self._get(request, bucket, key)
        raise Refused(501, f"Not served here: {request.method} {request.target}", "NotImplemented")

    def _get(self, request: Request, bucket: Bucket, key: str) -> Answer:
        one = bucket.find(key)
        if one is None:
            raise Refused(404, "The specified key does not exist.", "NoSuchKey")
        modified = format_datetime(datetime.fromisoformat(one.modified), usegmt=True)
        headers = {"ETag": f'"{one.etag}"', "Content-Type": one.type, "Last-Modified": modified, **one.metadata}
        answer = file_answer(bucket.data(one), one.size, headers, request.headers.get("Range"))
        if answer.status == 416:
            raise Refused(416, "The requested range is not satisfiable", "InvalidRange")
        return answer

    def _list_parts(self, request: Request, bucket: Bucket, key: str, upload: str) -> Answer:
        after = int(request.query.get("part-number-marker", 0))
        most = min(int(request.query.get("max-parts", self.page)), self.page)
        parts = [part for number, part in sorted(bucket.parts(upload).items()) if number > after]
        shown = [
            ("Part", [("PartNumber", part.number), ("ETag", f'"{part.md5}"'), ("Size", part.size)])
            for part in parts[:most]
        ]
        top = [("Bucket", bucket.folder.name), ("Key", key), ("UploadId", upload), ("MaxParts", str(most))]
        top += [("IsTruncated", "true" if len(parts) > most else "false")]
        top += [("NextPartNumberMarker", str(parts[most - 1].number))] if len(parts) > most else []
        return _xml("ListPartsResult", [*top, *shown])

    def _complete(self, request: Request, bucket: Bucket, key: str, upload: str) -> Answer:
        there = bucket.parts(upload)
        wanted: list[Part] = []
        for one in _parse(request).iter("Part"):
            part = there.get(int(one.findtext("PartNumber") or 0))
            if part is None or part.md5 != (one.findtext("ETag") or "").strip('"'):
                what = f"Part {one.findtext('PartNumber')} was not uploaded, or not with this ETag"
                raise Refused(400, what, "InvalidPart")
            if wanted and wanted[-1].number >= part.number:
                raise Refused(400, "The parts are not in ascending order", "InvalidPartOrder")
            wanted.append(part)
        if not wanted:
            raise Refused(400, "No parts are named", "MalformedXML")
        if any(part.size < self.min_part for part in wanted[:-1]):
            raise Refused(400, "A part other than the last is smaller than allowed", "EntityTooSmall")
        stored = bucket.complete(key, upload, wanted, only_new=_only_new(request))
        made = [("Bucket", bucket.folder.name), ("Key", key), ("ETag", f'"{stored.etag}"')]
        return _xml("CompleteMultipartUploadResult", made)


class S3Process(Process, S3Control):
    """A store in a process of its own: `stop` ends it, `kill` ends it at once."""

    def __init__(self, folder: Path, keys: Mapping[str, str], arguments: Sequence[str]) -> None:
        self.folder, self.keys = folder, keys
        super().__init__("penstock.testing.s3", arguments)


def _describe(bucket: Bucket) -> dict[str, Any]:
    objects = {one.key: {"size": one.size, "etag": one.etag, "sha256": one.sha256} for one in bucket.all()}
    uploads = []
    for one in bucket.uploads():
        with suppress(Refused, FileNotFoundError):  # completed or aborted since it was listed
            uploads.append({"key": one["key"], "id": one["id"], "parts": sorted(bucket.parts(one["id"]))})
    return {"objects": objects, "uploads": uploads}


def _content(request: Request) -> Body | Chunked:
    """A body without the framing S3 clients put around it for checksums that follow the data."""
    signed = request.headers.get("x-amz-content-sha256", "")
    if "aws-chunked" in request.headers.get("Content-Encoding", "") or signed.startswith("STREAMING-"):
        return Chunked(io.BufferedReader(request.body, BUFFER))
    return request.body


def _check(request: Request, received: Received) -> None:
    """A body against the length and digests sent with it."""
    headers = request.headers
    md5 = base64.b64encode(bytes.fromhex(received.md5)).decode()
    if int(headers.get("x-amz-decoded-content-length") or received.size) != received.size:
        raise Refused(400, "The body is not as long as announced", "IncompleteBody")
    if headers.get("Content-MD5", md5) != md5:
        raise Refused(400, "The Content-MD5 does not match the body", "BadDigest")
    signed = headers.get("x-amz-content-sha256", "")
    if re.fullmatch(r"[0-9a-f]{64}", signed) and signed != received.sha256:
        raise Refused(400, "The x-amz-content-sha256 does not match the body", "XAmzContentSHA256Mismatch")


def _kept(request: Request) -> Kept:
    metadata = {key.lower(): value for key, value in request.headers.items() if key.lower().startswith("x-amz-meta-")}
    return Kept(request.headers.get("Content-Type", "binary/octet-stream"), metadata)


def _only_new(request: Request) -> bool:
    return request.headers.get("If-None-Match") == "*"


def _access_key(request: Request) -> str | None:
    found = re.search(r"Credential=([^/]+)/", request.headers.get("Authorization", ""))
    return found[1] if found else (request.query.get("X-Amz-Credential", "").partition("/")[0] or None)


def _parse(request: Request) -> ElementTree.Element:
    try:
        root = ElementTree.fromstring(request.body.readall() or b"<none/>")
    except ElementTree.ParseError as error:
        raise Refused(400, f"The XML is not well-formed: {error}", "MalformedXML") from error
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def _xml(name: str, items: Xml, *, status: int = 200) -> Answer:
    def write(items: Xml) -> str:
        texts = ((tag, write(value) if isinstance(value, list) else escape(str(value))) for tag, value in items)
        return "".join(f"<{tag}>{text}</{tag}>" for tag, text in texts)

    space = (
        "" if name == "Error" else f' xmlns="{_NAMESPACE}"'
    )  # as S3 has it; boto3 finds no code in an error with one
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}{space}>{write(items)}</{name}>'
    return Answer(status, text.encode(), {"Content-Type": "application/xml"})


def main() -> None:
    parser = command_line("s3", "A loopback S3-style store.")
    parser.add_argument("--keys", type=json.loads, default=KEYS, help="JSON: access key -> secret key")
    parser.add_argument("--min-part", type=int, default=MIN_PART, help="bytes every part but the last must have")
    parser.add_argument("--page", type=int, default=PAGE, help="keys listed at once")
    given = vars(parser.parse_args())
    with_parent = given.pop("with_parent")
    serve_until_ended(LoopbackS3(given.pop("folder"), **given), with_parent=with_parent)


if __name__ == "__main__":
    main()
