"""git-annex, DataLad and git-lfs: what stands in the place of a content, what it must be, and how it is fetched."""

from __future__ import annotations

import hashlib
import os
import shlex
from pathlib import Path

import pytest

from penstock.media.annex import fetch_command, not_fetched, parse_key, submodule_command

SHA = hashlib.sha256(b"scan").hexdigest()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A DataLad dataset with one folder."""
    root = tmp_path / "ds 1"
    (root / ".git" / "annex" / "objects").mkdir(parents=True)
    (root / ".datalad").mkdir()
    (root / "sub-01").mkdir()
    return root


def link(path: Path, key: str, *, content: bytes | None = None) -> Path:
    """A locked annexed file: a link into the annex, and what it leads to, if it is here."""
    path.symlink_to(f"../.git/annex/objects/Gx/4w/{key}/{key}")
    if content is not None:
        target = path.parent / os.readlink(path)
        target.parent.mkdir(parents=True)
        target.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("text", "size", "algorithm", "digest"),
    [
        (f"SHA256E-s4--{SHA}.nii.gz", 4, "sha256", SHA),
        (f"SHA256-s4--{SHA}", 4, "sha256", SHA),
        (f"SHA256E--{SHA}.nii.gz", None, "sha256", SHA),
        (f"SHA256E-s4-m1700000000--{SHA}.tar.gz", 4, "sha256", SHA),
        ("SHA1-s7--" + "a" * 40, 7, "sha1", "a" * 40),
        ("MD5E-s7--" + "b" * 32 + ".json", 7, "md5", "b" * 32),
        ("SHA512E-s7--" + "c" * 128, 7, "sha512", "c" * 128),
        ("BLAKE2B256E-s7--" + "d" * 64 + ".x", 7, "blake2b", "d" * 64),
        ("URL--https&c%%openneuro.org%scan.nii.gz", None, None, None),
        ("URL-s99--https&c%%openneuro.org%scan.nii.gz", 99, None, None),
        ("WORM-s3-m1700000000--a name.nii", 3, None, None),
        (f"SHA256E-s4096-S1024-C2--{SHA}.nii", None, None, None),
    ],
)
def test_keys(text: str, size: int | None, algorithm: str | None, digest: str | None) -> None:
    key = parse_key(text)
    assert key is not None
    assert (key.size, key.algorithm, key.digest) == (size, algorithm, digest)
    assert (key.hasher() is None) == (digest is None)


@pytest.mark.parametrize("text", ["", "README", "scan.nii.gz", "SHA256E-s4", "-s4--x", "sha256-s4--" + SHA])
def test_what_is_no_key(text: str) -> None:
    assert parse_key(text) is None


def test_hashers_end_in_the_digest() -> None:
    for name, made in (
        ("SHA256E", SHA),
        ("MD5", hashlib.md5(b"scan").hexdigest()),
        ("SHA3_256E", hashlib.sha3_256(b"scan").hexdigest()),
        ("BLAKE2B256", hashlib.blake2b(b"scan", digest_size=32).hexdigest()),
    ):
        key = parse_key(f"{name}-s4--{made}")
        assert key is not None
        hasher = key.hasher()
        assert hasher is not None
        hasher.update(b"scan")
        assert hasher.hexdigest() == key.digest


def test_dangling_link_is_not_fetched(dataset: Path) -> None:
    scan = link(dataset / "sub-01" / "T1w.nii.gz", f"SHA256E-s1234--{SHA}.nii.gz")
    found = not_fetched(scan)
    assert found is not None
    assert (found.how, found.size, found.key.digest) == ("annex link", 1234, SHA)
    assert found.fetch_command == f"cd {shlex.quote(str(dataset.resolve()))} && datalad get sub-01/T1w.nii.gz"


def test_entries_of_a_folder_are_taken_too(dataset: Path) -> None:
    link(dataset / "sub-01" / "T1w.nii.gz", f"SHA256E-s1234--{SHA}.nii.gz")
    with os.scandir(dataset / "sub-01") as entries:
        assert [not_fetched(entry) is not None for entry in entries] == [True]


def test_link_with_its_content_is_content(dataset: Path) -> None:
    assert not_fetched(link(dataset / "sub-01" / "T1w.nii.gz", f"SHA256E-s4--{SHA}.nii.gz", content=b"scan")) is None


def test_other_links_are_not_the_annexes(dataset: Path) -> None:
    plain = dataset / "sub-01" / "plain"
    plain.symlink_to("nowhere/at/all")
    assert not_fetched(plain) is None
    assert not_fetched(dataset / "not there") is None
    assert not_fetched(dataset / "sub-01") is None


@pytest.mark.parametrize(
    "text",
    [
        f"/annex/objects/SHA256E-s1234--{SHA}.nii.gz\n",
        f"/annex/objects/SHA256E-s1234--{SHA}.nii.gz",
        f"/annex/objects/SHA256E-s1234--{SHA}.nii.gz\r\n",
        f"../.git/annex/objects/Gx/4w/SHA256E-s1234--{SHA}.nii.gz/SHA256E-s1234--{SHA}.nii.gz",
    ],
)
def test_unlocked_pointer_is_not_fetched(dataset: Path, text: str) -> None:
    scan = dataset / "sub-01" / "T1w.nii.gz"
    scan.write_bytes(text.encode())
    found = not_fetched(scan)
    assert found is not None
    assert (found.how, found.size, found.key.digest) == ("annex pointer", 1234, SHA)


def test_lfs_pointer_is_not_fetched(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    scan = tmp_path / "scan.nii.gz"
    scan.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{SHA}\nsize 12345\n")
    found = not_fetched(scan)
    assert found is not None
    assert (found.how, found.size, found.key.digest) == ("lfs pointer", 12345, SHA)
    assert found.fetch_command.endswith("&& git lfs pull --include scan.nii.gz")


@pytest.mark.parametrize(
    "data",
    [b"", b"scan", b"/annex/objects/", b"/annex/objects/README", b"version https://git-lfs.github.com/spec/v1\n",
     f"/annex/objects/SHA256E-s1234--{SHA}.nii\n".encode() + bytes(40_000)],
)  # fmt: skip
def test_content_that_looks_like_a_pointer(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    assert not_fetched(tmp_path / "file") is None


def test_command_without_datalad_and_from_the_root_itself(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (dataset / ".datalad").rmdir()
    plain = dataset.parent / "plain"
    dataset.rename(plain)
    assert fetch_command(str(plain / "sub-01" / "a b.nii")) == f"cd {plain.resolve()} && git annex get 'sub-01/a b.nii'"
    monkeypatch.chdir(plain)
    assert fetch_command("sub-01/x.nii") == "git annex get sub-01/x.nii"


def test_command_outside_of_any_repository(tmp_path: Path) -> None:
    assert fetch_command(str(tmp_path / "x.nii")) == f"git annex get {tmp_path}/x.nii"


def test_a_part_that_is_an_empty_folder(dataset: Path) -> None:
    part = dataset / "sourcedata" / "raw"
    part.mkdir(parents=True)
    assert submodule_command(str(part)) is None
    (dataset / ".gitmodules").write_text('[submodule "raw"]\n\tpath = sourcedata/raw\n\turl = ./raw\n')
    command = submodule_command(str(part))
    assert command is not None
    assert command.endswith("&& datalad get sourcedata/raw")
    (part / "file").write_text("here")
    assert submodule_command(str(part)) is None
