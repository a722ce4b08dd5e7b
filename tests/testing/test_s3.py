"""The loopback S3 store through boto3, and through pyarrow's own client."""

from __future__ import annotations

import http.client
import io
import os
import time
from collections.abc import Iterator
from hashlib import md5, sha256
from pathlib import Path
from typing import Any

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from pyarrow import fs

from penstock.testing import LoopbackS3, Rule
from penstock.testing.s3 import S3Control

BUCKET = "scans"
DATA = os.urandom(2_500_000)


def client_of(s3: S3Control, *, key: str = "penstock", attempts: int = 1) -> Any:
    config = Config(retries={"total_max_attempts": attempts, "mode": "standard"}, proxies={})
    return boto3.client(
        "s3",
        endpoint_url=s3.url,
        aws_access_key_id=key,
        aws_secret_access_key="x",
        region_name="us-east-1",
        config=config,
    )


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[LoopbackS3]:
    with LoopbackS3(tmp_path / "s3", min_part=1_000_000, page=3) as started:
        yield started


@pytest.fixture
def client(s3: LoopbackS3) -> Any:
    made = client_of(s3)
    made.create_bucket(Bucket=BUCKET)
    return made


def upload(client: Any, s3: S3Control, key: str = "m.bin") -> tuple[str, list[dict[str, Any]]]:
    """An upload in three parts, not completed."""
    started = client.create_multipart_upload(Bucket=BUCKET, Key=key, Metadata={"by": "us"})["UploadId"]
    parts = []
    for number in (3, 1, 2):
        piece = DATA[(number - 1) * 1_000_000 : number * 1_000_000]
        got = client.upload_part(Bucket=BUCKET, Key=key, UploadId=started, PartNumber=number, Body=piece)
        parts.append({"PartNumber": number, "ETag": got["ETag"]})
    return started, sorted(parts, key=lambda part: int(part["PartNumber"]))


def complete(client: Any, started: str, parts: list[dict[str, Any]], key: str = "m.bin", **how: Any) -> Any:
    return client.complete_multipart_upload(
        Bucket=BUCKET, Key=key, UploadId=started, MultipartUpload={"Parts": parts}, **how
    )


@pytest.mark.parametrize("key", ["a", "a/b c/ü+&%2F.txt", "/lead//double/", "x" * 1000])
def test_an_object_comes_back_as_it_was(client: Any, s3: LoopbackS3, key: str) -> None:
    put = client.put_object(Bucket=BUCKET, Key=key, Body=DATA, Metadata={"by": "us"}, ContentType="text/plain")
    assert put["ETag"] == f'"{md5(DATA).hexdigest()}"'
    got = client.get_object(Bucket=BUCKET, Key=key)
    assert (got["Body"].read(), got["Metadata"], got["ContentType"]) == (DATA, {"by": "us"}, "text/plain")
    head = client.head_object(Bucket=BUCKET, Key=key)
    assert (head["ContentLength"], head["ETag"]) == (len(DATA), put["ETag"])
    assert s3.objects(BUCKET) == {
        key: {"size": len(DATA), "etag": md5(DATA).hexdigest(), "sha256": sha256(DATA).hexdigest()}
    }
    for wanted, expected in (("bytes=5-9", DATA[5:10]), ("bytes=-7", DATA[-7:]), ("bytes=2499990-", DATA[-10:])):
        assert client.get_object(Bucket=BUCKET, Key=key, Range=wanted)["Body"].read() == expected
    with pytest.raises(ClientError, match="InvalidRange"):
        client.get_object(Bucket=BUCKET, Key=key, Range="bytes=2500000-")


def test_an_object_is_replaced_and_deleted(client: Any, s3: LoopbackS3) -> None:
    for body in (b"old", b"new"):
        client.put_object(Bucket=BUCKET, Key="a", Body=body)
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=BUCKET, Key="a", Body=b"newer", IfNoneMatch="*")
    assert client.get_object(Bucket=BUCKET, Key="a")["Body"].read() == b"new"
    assert len(list((s3.folder / "buckets" / BUCKET / "data").iterdir())) == 1
    client.put_object(Bucket=BUCKET, Key="b", Body=b"", IfNoneMatch="*")
    client.delete_object(Bucket=BUCKET, Key="a")
    client.delete_object(Bucket=BUCKET, Key="never")
    gone = client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "b"}, {"Key": "c"}]})
    assert [one["Key"] for one in gone["Deleted"]] == ["b", "c"]
    assert (s3.objects(BUCKET), list((s3.folder / "buckets" / BUCKET / "data").iterdir())) == ({}, [])


def test_keys_are_listed_page_by_page(client: Any, s3: LoopbackS3) -> None:
    keys = sorted([*(f"data/{at}/x y.txt" for at in range(5)), "data/a&<b>.txt", "other"])
    for key in keys:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    s3.clear_log()
    pages = list(client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET))
    assert [one["Key"] for page in pages for one in page["Contents"]] == keys
    assert len(s3.log()) == 3
    pages = list(client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="data/", Delimiter="/"))
    assert [one["Prefix"] for page in pages for one in page.get("CommonPrefixes", [])] == [
        f"data/{at}/" for at in range(5)
    ]
    assert [one["Key"] for page in pages for one in page.get("Contents", [])] == ["data/a&<b>.txt"]
    after = client.list_objects_v2(Bucket=BUCKET, StartAfter="data/a&<b>.txt")
    assert [one["Key"] for one in after["Contents"]] == ["other"]
    assert client.list_objects_v2(Bucket=BUCKET, Prefix="nothing")["KeyCount"] == 0


def test_parts_are_no_object_before_they_are_completed(client: Any, s3: LoopbackS3) -> None:
    started, parts = upload(client, s3)
    assert s3.objects(BUCKET) == {}
    assert s3.uploads(BUCKET) == [{"key": "m.bin", "id": started, "parts": [1, 2, 3]}]
    with pytest.raises(ClientError, match="NoSuchKey"):
        client.get_object(Bucket=BUCKET, Key="m.bin")
    listed = client.list_parts(Bucket=BUCKET, Key="m.bin", UploadId=started)["Parts"]
    assert [(one["PartNumber"], one["Size"]) for one in listed] == [(1, 1_000_000), (2, 1_000_000), (3, 500_000)]
    uploads = client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [(one["Key"], one["UploadId"]) for one in uploads] == [("m.bin", started)]
    tag = complete(client, started, parts)["ETag"]
    whole = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in parts)
    assert tag == f'"{md5(whole).hexdigest()}-3"'
    got = client.get_object(Bucket=BUCKET, Key="m.bin")
    assert (got["Body"].read(), got["Metadata"]) == (DATA, {"by": "us"})
    assert s3.uploads(BUCKET) == []


def test_a_wrong_completion_is_refused_and_an_upload_can_be_given_up(client: Any, s3: LoopbackS3) -> None:
    started, parts = upload(client, s3)
    for wrong, code in (
        (parts[::-1], "InvalidPartOrder"),
        ([*parts[:2], parts[2] | {"PartNumber": 4}], "InvalidPart"),
        ([parts[0] | {"ETag": parts[1]["ETag"]}], "InvalidPart"),
        ([parts[0], parts[2], *upload_small(client, started)], "EntityTooSmall"),
    ):
        with pytest.raises(ClientError, match=code):
            complete(client, started, wrong)
    assert s3.objects(BUCKET) == {}
    client.abort_multipart_upload(Bucket=BUCKET, Key="m.bin", UploadId=started)
    assert s3.uploads(BUCKET) == []
    with pytest.raises(ClientError, match="NoSuchUpload"):
        complete(client, started, parts)


def upload_small(client: Any, started: str) -> list[dict[str, Any]]:
    got = client.upload_part(Bucket=BUCKET, Key="m.bin", UploadId=started, PartNumber=9, Body=b"last")
    return [{"PartNumber": 9, "ETag": got["ETag"]}]


def test_a_part_sent_again_counts_once(client: Any, s3: LoopbackS3) -> None:
    started, _ = upload(client, s3)
    client.upload_part(Bucket=BUCKET, Key="m.bin", UploadId=started, PartNumber=1, Body=b"z" * 1_000_000)
    client.upload_part(Bucket=BUCKET, Key="m.bin", UploadId=started, PartNumber=1, Body=DATA[:1_000_000])
    listed = client.list_parts(Bucket=BUCKET, Key="m.bin", UploadId=started)["Parts"]
    complete(client, started, [{"PartNumber": one["PartNumber"], "ETag": one["ETag"]} for one in listed])
    assert s3.objects(BUCKET)["m.bin"]["sha256"] == sha256(DATA).hexdigest()


def test_the_transfer_manager_sends_parts_side_by_side(client: Any, s3: LoopbackS3) -> None:
    data = DATA * 5
    parts = TransferConfig(multipart_threshold=1, multipart_chunksize=5 << 20, max_concurrency=3)
    client.upload_fileobj(io.BytesIO(data), BUCKET, "big.bin", Config=parts)
    assert s3.objects(BUCKET)["big.bin"]["sha256"] == sha256(data).hexdigest()
    back = io.BytesIO()
    client.download_fileobj(BUCKET, "big.bin", back, Config=parts)
    assert back.getvalue() == data


def test_pyarrow_reads_and_writes_it(client: Any, s3: LoopbackS3) -> None:
    store = fs.S3FileSystem(
        endpoint_override=s3.url, access_key="penstock", secret_key="x", region="us-east-1", allow_delayed_open=True
    )
    with store.open_output_stream(f"{BUCKET}/data/a.bin") as out:
        out.write(DATA)
    with store.open_input_file(f"{BUCKET}/data/a.bin") as file:
        assert file.read_at(10, 100) == DATA[100:110]
    listed = store.get_file_info(fs.FileSelector(f"{BUCKET}/data", recursive=True))
    assert [(one.path, one.size) for one in listed] == [(f"{BUCKET}/data/a.bin", len(DATA))]


def test_what_is_refused(client: Any, s3: LoopbackS3) -> None:
    with pytest.raises(ClientError, match="InvalidAccessKeyId"):
        client_of(s3, key="thief").list_objects_v2(Bucket=BUCKET)
    with pytest.raises(ClientError, match="NoSuchBucket"):
        client.put_object(Bucket="nowhere", Key="a", Body=b"")
    with pytest.raises(ClientError, match="BucketAlreadyOwnedByYou"):
        client.create_bucket(Bucket=BUCKET)
    with pytest.raises(ClientError, match="404"):
        client.head_bucket(Bucket="nowhere")
    with pytest.raises(ClientError, match="NoSuchKey"):
        client.get_object(Bucket=BUCKET, Key="nothing")
    with pytest.raises(ClientError, match="BadDigest"):
        client.put_object(Bucket=BUCKET, Key="a", Body=b"a", ContentMD5="1B2M2Y8AsgTpgAmY7PhCfg==")
    with pytest.raises(ClientError, match="NotImplemented"):
        client.copy_object(Bucket=BUCKET, Key="b", CopySource=f"{BUCKET}/a")
    connection = http.client.HTTPConnection("127.0.0.1", s3.port)
    connection.request("GET", f"/{BUCKET}?list-type=2")
    answer = connection.getresponse()
    assert (answer.status, b"<Code>AccessDenied</Code>" in answer.read()) == (403, True)
    assert s3.log()[-1]["who"] is None
    assert s3.objects(BUCKET) == {}


@pytest.mark.parametrize("kind", ["STREAMING-UNSIGNED-PAYLOAD-TRAILER", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"])
def test_framed_bodies_are_unpacked(client: Any, s3: LoopbackS3, kind: str) -> None:
    """As boto3 sends them over https, which these tests do not speak."""
    sign = b"" if "UNSIGNED" in kind else b";chunk-signature=" + b"0" * 64
    frames = [b"%x%s\r\n%s\r\n" % (len(piece), sign, piece) for piece in (DATA[:65_536], DATA[65_536:])]
    trailer = b"x-amz-checksum-crc32:AAAAAA==\r\n" if "TRAILER" in kind else b""
    body = b"".join([*frames, b"0" + sign + b"\r\n", trailer, b"\r\n"])
    headers = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=penstock/20260101/us-east-1/s3/aws4_request, Signature=x",
        "Content-Encoding": "aws-chunked",
        "x-amz-content-sha256": kind,
        "x-amz-decoded-content-length": str(len(DATA)),
    }
    connection = http.client.HTTPConnection("127.0.0.1", s3.port)
    for length, status in ((len(DATA), 200), (len(DATA) + 1, 400)):
        connection.request("PUT", f"/{BUCKET}/a", body, headers | {"x-amz-decoded-content-length": str(length)})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
    assert s3.objects(BUCKET)["a"]["sha256"] == sha256(DATA).hexdigest()


def test_faults_reach_the_real_client(client: Any, s3: LoopbackS3) -> None:
    s3.set_faults(
        rules=(Rule("PUT", "status:503"), Rule("PUT", "reset", after_bytes=10), Rule("uploadId", "lose_answer"))
    )
    with pytest.raises(ClientError, match="SlowDown"):
        client.put_object(Bucket=BUCKET, Key="a", Body=DATA)
    with pytest.raises(BotoCoreError):
        client.put_object(Bucket=BUCKET, Key="a", Body=DATA)
    assert s3.objects(BUCKET) == {}
    s3.set_faults(rules=(Rule("POST .*uploadId", "lose_answer"),))
    started, parts = upload(client, s3)
    with pytest.raises(BotoCoreError):
        complete(client, started, parts)
    assert list(s3.objects(BUCKET)) == ["m.bin"], "it went through all the same"
    s3.set_faults(rules=(Rule("GET", "status:500"),))
    assert client_of(s3, attempts=2).get_object(Bucket=BUCKET, Key="m.bin")["Body"].read() == DATA


def test_a_killed_store_goes_on_where_it_was(tmp_path: Path) -> None:
    s3 = LoopbackS3.start_process(tmp_path, min_part=1_000_000)
    client = client_of(s3)
    client.create_bucket(Bucket=BUCKET)
    client.put_object(Bucket=BUCKET, Key="a", Body=b"a")
    started, parts = upload(client, s3)
    before = s3.state()
    half = http.client.HTTPConnection("127.0.0.1", s3.port)
    half.putrequest("PUT", f"/{BUCKET}/half")
    half.putheader("Authorization", "Credential=penstock/")
    half.putheader("Content-Length", "100")
    half.endheaders(b"x" * 50)
    while not list(tmp_path.glob("buckets/*/data/.*")):
        time.sleep(0.01)
    s3.kill()
    with LoopbackS3.start_process(tmp_path, min_part=1_000_000, port=s3.port) as again:
        assert again.state() == before
        assert list(tmp_path.glob("buckets/*/data/.*")) == []
        complete(client, started, parts)
        assert again.objects(BUCKET)["m.bin"]["sha256"] == sha256(DATA).hexdigest()


def test_its_variables_are_enough_for_boto3(s3: LoopbackS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.env().items():
        monkeypatch.setenv(name, value)
    boto3.session.Session().client("s3").create_bucket(Bucket=BUCKET)
    assert s3.log()[0]["who"] == "penstock"
