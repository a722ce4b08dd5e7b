"""What the tests of pushing share: a Hub and a user before it, media to push, and what became of it."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from command import Ran, called, until
from forks import Forked, Forks
from penstock.publish.card import read_card, visible_files
from penstock.testing.hub import HubProcess

if TYPE_CHECKING:
    import pyarrow as pa

BRIEF = 40  # requests after which the token hf_brief expires

_numbers = itertools.count()


@dataclass
class Desk:
    """A user: a Hub, a folder for files, a state folder, and commands to type."""

    hub: HubProcess
    forks: Forks
    folder: Path
    repo: str = field(default_factory=lambda: f"org/set-{next(_numbers)}")
    here: bool = False  # whether commands that are not to be killed run in this very process

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def env(self, token: str | None = "hf_writer") -> dict[str, str]:
        return {**self.hub.env(token), "PENSTOCK_STATE": str(self.state), "PENSTOCK_RETRY_SECONDS": "0.002"}

    def start(self, *words: str | Path, token: str | None = "hf_writer") -> Forked:
        """`penstock WORDS`, under way."""
        streams = self.folder / f"said-{next(_numbers)}"
        return self.forks.start(*words, env={"HF_TOKEN": None, **self.env(token)}, streams=streams)

    def run(self, *words: str | Path, token: str | None = "hf_writer", timeout: float = 60) -> Ran:
        """`penstock WORDS`, to its end."""
        if not self.here:
            return self.start(*words, token=token).ended(timeout=timeout)
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("HF_TOKEN", raising=False)
            for name, value in self.env(token).items():
                patch.setenv(name, value)
            return called(*words)

    # -- what is in hand ------------------------------------------------------------------------------------------

    def journal(self) -> list[dict[str, Any]]:
        """The whole lines of the journal of the push under way, its head left out."""
        found = list(self.state.glob("push/*/journal.jsonl"))
        if not found:
            return []
        lines = found[0].read_bytes().split(b"\n")[:-1]
        return [json.loads(line.partition(b" ")[2]) for line in lines[1:]]

    def started(self) -> bool:
        return any(self.state.glob("push/*/journal.jsonl"))

    def hashed(self) -> int:
        return sum(line["key"].startswith("task/hashed/") for line in self.journal())

    def sent(self) -> int:
        return sum(line["key"].startswith("task/sent/") for line in self.journal())

    def left(self) -> list[str]:
        """Files in the state folder: after success only receipts, and locks."""
        return sorted(path.name for path in self.state.rglob("*") if path.is_file() and path.name != "lock")

    def says(self, text: str) -> list[Path]:
        """Files of this user, the Hub's own left out, that hold a text."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and path.stat().st_size < 1 << 22]
        return [path for path in files if text.encode() in path.read_bytes()]

    # -- what is on the Hub ---------------------------------------------------------------------------------------

    def files(self, repo: str | None = None, revision: str = "main") -> dict[str, str]:
        """What a push left: path -> SHA-256, without the Hub's own file. A card's first line names its repository."""
        repo = repo or self.repo
        found = self.hub.files(repo, revision=revision)
        found.pop(".gitattributes", None)
        if "README.md" in found:
            text = self.stored(found["README.md"]).decode().replace(repo.split("/")[1], "NAME")
            found["README.md"] = sha256(text.encode()).hexdigest()
        return found

    def commits(self, revision: str = "main") -> list[dict[str, Any]]:
        """What was committed after the Hub's own first commit."""
        return self.hub.history(self.repo, revision=revision)[1:]

    def stored(self, digest: str) -> bytes:
        return self.blob(digest).read_bytes()

    def blob(self, digest: str) -> Path:
        return self.hub.folder / "blobs" / digest[:2] / digest

    def shards(self, split: str = "train", revision: str = "main") -> list[Path]:
        """The Parquet files of a split, in order."""
        files = self.hub.files(self.repo, revision=revision)
        return [
            self.blob(files[path]) for path in sorted(files) if re.search(rf"/{split}-[0-9a-f]{{8}}/.*parquet$", path)
        ]

    def receipt(self, *, config: str = "default", split: str = "train") -> dict[str, Any]:
        """The receipt that travels with the dataset."""
        found: dict[str, Any] = json.loads(self.stored(self.files()[f".penstock/{config}/{split}.json"]))
        return found

    def card(self, commit: Mapping[str, Any] | None = None) -> Any:
        """The front matter of a commit's README."""
        files = commit["files"] if commit is not None else self.hub.files(self.repo)
        return read_card(self.stored(files["README.md"]).decode()).data

    def seen(self, commit: Mapping[str, Any]) -> dict[str, str]:
        """What `load_dataset` would find in a commit."""
        files: dict[str, str] = commit["files"]
        card = read_card(self.stored(files["README.md"]).decode() if "README.md" in files else None)
        return {path: files[path] for path in visible_files(card, list(files))}

    def states(self) -> list[dict[str, str]]:
        """What was visible over the whole history, each state once in a row."""
        seen = [self.seen(commit) for commit in self.hub.history(self.repo)]
        return [one for at, one in enumerate(seen) if not at or one != seen[at - 1]]

    # -- what was asked of it -------------------------------------------------------------------------------------

    def asked(self, pattern: str, *, answered: bool = True) -> list[dict[str, Any]]:
        """Requests whose "METHOD path" matches, those that went well or all."""
        found = [one for one in self.hub.log() if re.search(pattern, f"{one['method']} {one['path']}")]
        return [one for one in found if not answered or one["status"] == 200]

    def uploads(self) -> Counter[str]:
        """How often each piece of content went over the wire to its end, whole or in parts."""
        ended = self.asked(r"^PUT /_lfs/[0-9a-f]{64}$|^POST /_lfs/[0-9a-f]{64}/(?!verify)")
        return Counter(one["path"].split("/")[2] for one in ended)

    def writes(self) -> list[str]:
        """Requests that change something."""
        made = [f"{one['method']} {one['path']}" for one in self.hub.log()]
        return [line for line in made if not line.startswith(("GET", "HEAD"))]


def nothing_sent_twice(desk: Desk) -> None:
    twice = {digest: times for digest, times in desk.uploads().items() if times > 1}
    assert not twice


def nothing_done(desk: Desk) -> None:
    """A push that was refused before any work: no repository, no content, nothing hashed."""
    assert desk.hub.history(desk.repo) == []
    assert [line for line in desk.writes() if "validate-yaml" not in line] == []
    assert not desk.started()


@pytest.fixture
def at_hub(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """This very process turned to the Hub: what the clients read from the environment when they are imported."""
    import datasets
    import huggingface_hub.constants

    for name, value in desk.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", desk.hub.url)
    template = desk.hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(desk.folder / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", desk.hub.url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(desk.folder / "loaded"))
    datasets.disable_progress_bars()
    desk.here = True
    return desk


def loaded(desk: Desk, *words: str, **given: Any) -> Any:
    """`load_dataset` of what was pushed, files as they are stored."""
    import datasets

    repo = given.pop("repo", desk.repo)
    found = datasets.load_dataset(repo, *words, **given)
    if isinstance(found, datasets.DatasetDict):
        return datasets.DatasetDict({name: undecoded(one) for name, one in found.items()})
    return undecoded(found)


def undecoded(dataset: Any) -> Any:
    return dataset.cast(type(dataset.features)({name: _undecoded(one) for name, one in dataset.features.items()}))


def _undecoded(feature: Any) -> Any:
    from dataclasses import replace

    import datasets

    if isinstance(feature, datasets.List):
        return datasets.List(_undecoded(feature.feature), length=feature.length)
    if isinstance(feature, dict):
        return {name: _undecoded(one) for name, one in feature.items()}
    return replace(feature, decode=False) if hasattr(feature, "decode") else feature


def digests(value: Any) -> Any:
    """A value with the digest of each file in place of the file; None and [] as they are."""
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        return sha256(value["bytes"]).hexdigest()
    if isinstance(value, bytes):
        return sha256(value).hexdigest()
    if isinstance(value, list):
        return [digests(one) for one in value]
    if isinstance(value, dict):
        return {name: digests(one) for name, one in value.items()}
    return value


def digests_of_paths(value: Any) -> Any:
    """The same of the paths that were pushed."""
    if isinstance(value, str | Path):
        with open(value, "rb") as f:
            from hashlib import file_digest

            return file_digest(f, "sha256").hexdigest()
    if isinstance(value, list):
        return [digests_of_paths(one) for one in value]
    return value


# -- what is pushed ---------------------------------------------------------------------------------------------------


def make_scans(folder: Path, count: int, *, size: int = 2_000, ending: str = ".nii.gz") -> list[Path]:
    """Files of random bytes, each with a size of its own. No two calls give the same: a Hub would know them already."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(next(_numbers))
    made = []
    for at in range(count):
        path = folder / f"scan-{at:04d}{ending}"
        path.write_bytes(rng.bytes(size + at))
        made.append(path)
    return made


def make_table(folder: Path, columns: Mapping[str, Sequence[Any]], *, name: str = "table.jsonl") -> Path:
    """A table of paths as JSON lines, the paths relative to it."""
    folder.mkdir(parents=True, exist_ok=True)

    def relative(value: Any) -> Any:
        if isinstance(value, list):
            return [relative(one) for one in value]
        return os.path.relpath(value, folder) if isinstance(value, Path) else value

    rows = zip(*columns.values(), strict=True)
    text = "".join(json.dumps(dict(zip(columns, map(relative, row), strict=True))) + "\n" for row in rows)
    (folder / name).write_text(text)
    return folder / name


def scan_table(folder: Path, count: int, *, size: int = 2_000) -> Path:
    """`count` rows of an id and a scan."""
    scans = make_scans(folder / "scans", count, size=size)
    return make_table(folder, {"id": list(range(count)), "scan": scans})


def png(path: Path, *, seed: int, side: int = 8) -> Path:
    """A picture that decodes."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def nifti(path: Path, *, seed: int, side: int = 4) -> Path:
    """A scan that decodes: a header of the NIfTI-1 standard and its voxels."""
    import gzip
    import struct

    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytearray(352)
    struct.pack_into("<i", header, 0, 348)
    struct.pack_into("<8h", header, 40, 3, side, side, side, 1, 1, 1, 1)
    struct.pack_into("<hh", header, 70, 16, 32)  # float32
    struct.pack_into("<8f", header, 76, 1, 1, 1, 1, 1, 1, 1, 1)
    struct.pack_into("<f", header, 108, 352)
    header[344:348] = b"n+1\0"
    voxels = np.random.default_rng(seed).random(side**3, dtype=np.float32).tobytes()
    path.write_bytes(gzip.compress(bytes(header) + voxels, mtime=0))
    return path


def under_way(desk: Desk, *words: str | Path, asked: str) -> Forked:
    """A push that has just made a request like this one. Before its first, a push is at reading and planning."""
    before = len(desk.asked(asked, answered=False))
    push = desk.start(*words)
    waits(desk, lambda: len(desk.asked(asked, answered=False)) > before, push, why=f"it asked for {asked}")
    return push


def waits(desk: Desk, true: Callable[[], object], push: Forked, *, why: str) -> None:
    """Until something holds of a push that is still under way."""

    def look() -> bool:
        held = bool(true())
        assert held or not push.has_ended(), f"the push ended before: {why}"
        return held

    until(look, seconds=30, why=why)


def row_group_bytes(path: Path) -> Iterator[bytes]:
    """The stored bytes of every column chunk of a Parquet file."""
    import pyarrow.parquet as pq

    about = pq.read_metadata(path)
    data = path.read_bytes()
    for group in range(about.num_row_groups):
        for column in range(about.num_columns):
            chunk = about.row_group(group).column(column)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            yield data[start : start + chunk.total_compressed_size]


def stored_schema(path: Path) -> pa.Schema:
    import pyarrow.parquet as pq

    return pq.read_schema(path)
