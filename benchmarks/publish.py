"""The claim: a table of paths is published in a fixed budget, without scratch disk, about as fast as bytes can be sent.

python benchmarks/publish.py --to /data --markdown publish.md

Two tables. The first is time, memory and disk of publishing scans to a Hub on this machine, against what people use
today and against the least there is to do. The second is the same with several media columns, in a kernel memory limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import Case, bytes_in, compare, files_of, in_fresh_process, machine, table, watched

if TYPE_CHECKING:
    from scans import Files

REPO = "org/scans"
PENSTOCK = "from penstock.cli.main import main; raise SystemExit(main())"
COMMAND_BUDGET, CALL_BUDGET = "150MB", "300MB"  # importing `datasets` alone takes over 100 MB
LIMIT_BUDGET = "512MB"
FIGURES = ("seconds", "MB", "scratch MB", "output MB")
LIMITED = "limited"
PART = 1 << 20
# As the real Hub takes up to 5 GB in one request, everybody here sends a shard in one.
ONE_REQUEST = 5_000_000_000


# -- the least there is to do -----------------------------------------------------------------------------------------


def hash_then_send(source: str, shard_bytes: str) -> None:
    """Everything is hashed, then everything is sent: LFS asks for the digest first."""
    send = _sender()
    for body, digest in [(body, _digest(body)) for body in _bodies(source, int(shard_bytes))]:
        send(body, digest)


def hash_while_sending(source: str, shard_bytes: str) -> None:
    """A body is hashed while the one before it is sent: the best that can be done with two passes."""
    from concurrent.futures import ThreadPoolExecutor

    send = _sender()
    bodies = _bodies(source, int(shard_bytes))
    with ThreadPoolExecutor(1) as pool:
        for body, digest in zip(bodies, pool.map(_digest, bodies), strict=True):
            send(body, digest)


def _bodies(source: str, shard_bytes: int) -> list[list[str]]:
    """The files as they are, in stretches of the size of a shard."""
    bodies: list[list[str]] = [[]]
    held = 0
    for row in map(json.loads, Path(source).read_text().splitlines()):
        size = os.path.getsize(row["scan"])
        if bodies[-1] and held + size > shard_bytes:
            bodies.append([])
            held = 0
        bodies[-1].append(row["scan"])
        held += size
    return bodies


def _parts(body: Sequence[str]) -> Iterator[bytes]:
    for path in body:
        with open(path, "rb", buffering=0) as file:
            while part := file.read(PART):
                yield part


def _digest(body: Sequence[str]) -> bytes:
    digest = hashlib.sha256()
    for part in _parts(body):
        digest.update(part)
    return digest.digest()


def _sender() -> Callable[[Sequence[str], bytes], None]:
    """Sends a body where the Hub says, by the client all tools here use, with nothing around it."""
    from huggingface_hub import HfApi, get_session
    from huggingface_hub.lfs import UploadInfo, post_lfs_batch_info

    HfApi().create_repo(REPO, repo_type="dataset")

    def send(body: Sequence[str], digest: bytes) -> None:
        size = sum(map(os.path.getsize, body))
        info = UploadInfo(size=size, sample=b"", sha256=digest)
        (answer,), *_ = post_lfs_batch_info([info], token=None, repo_type="dataset", repo_id=REPO)
        link = answer["actions"]["upload"]["href"]
        get_session().put(link, content=_parts(body), headers={"Content-Length": str(size)}).raise_for_status()

    return send


# -- the tools --------------------------------------------------------------------------------------------------------


def penstock_call(source: str, shard_bytes: str, memory: str) -> None:
    """In place of `push_to_hub`, on the same dataset."""
    import penstock as ps

    ps.push(_dataset(source), REPO, memory=memory, max_shard_size=int(shard_bytes))


def datasets_push(source: str, shard_bytes: str, shards: str = "") -> None:
    """`push_to_hub` as it is, or told how many shards to make, as its users learn to."""
    how = {"num_shards": int(shards)} if shards else {"max_shard_size": int(shard_bytes)}
    _dataset(source).push_to_hub(REPO, **how)


def arc_bids_loop(source: str, shard_bytes: str, shards: str) -> None:
    """The loop of arc-bids, later bids-hub: shard by shard, a file and a commit each."""
    import datasets
    import pyarrow.parquet as pq
    from datasets.table import embed_table_storage
    from huggingface_hub import HfApi

    data, count = _dataset(source), int(shards)
    api = HfApi()
    api.create_repo(REPO, repo_type="dataset", exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            shard = data.shard(num_shards=count, index=number, contiguous=True)
            frame = shard.to_pandas()
            fresh = datasets.Dataset.from_pandas(frame, preserve_index=False).cast(data.features)
            embedded = embed_table_storage(fresh._data.table.combine_chunks())
            path = Path(folder, f"train-{number:05d}-of-{count:05d}.parquet")
            pq.write_table(embedded, path)
            del fresh, frame
            api.upload_file(
                path_or_fileobj=str(path), path_in_repo=f"data/{path.name}", repo_id=REPO, repo_type="dataset"
            )
            path.unlink()
            del shard
        data.info.write_to_directory(folder)
        info = "dataset_info.json"
        api.upload_file(path_or_fileobj=f"{folder}/{info}", path_in_repo=info, repo_id=REPO, repo_type="dataset")


def _dataset(source: str) -> Any:
    """The table as a `datasets.Dataset` whose media columns hold paths."""
    import datasets

    kinds = {
        "id": datasets.Value("int64"),
        "scan": datasets.Nifti(),
        "t1w": datasets.Nifti(),
        "bold": datasets.List(datasets.Nifti()),
        "photo": datasets.Image(),
        "report": datasets.Pdf(),
    }
    rows = [json.loads(line) for line in Path(source).read_text().splitlines()]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return datasets.Dataset.from_dict(columns, datasets.Features({name: kinds[name] for name in columns}))


# -- where it goes ----------------------------------------------------------------------------------------------------


def _hub(work: Path) -> Path:
    return work / "hub"


def _scratch(work: Path) -> Path:
    return work / "scratch"


@contextmanager
def fresh_hub(work: Path) -> Iterator[Mapping[str, str]]:
    """An empty Hub in a process of its own, and the environment of a user who has no caches and no state."""
    from penstock.testing import LoopbackHub

    hub, scratch = _hub(work), _scratch(work)
    for folder in (hub, scratch):
        shutil.rmtree(folder, ignore_errors=True)
    homes = {"HF_HOME": scratch / "hf", "PENSTOCK_STATE": scratch / "state", "TMPDIR": scratch / "tmp"}
    for folder in homes.values():
        folder.mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PENSTOCK_"))}
    with LoopbackHub.start_process(hub, multipart_over=ONE_REQUEST) as running:
        yield {**kept, **running.env(), **{name: str(folder) for name, folder in homes.items()}}
    shutil.rmtree(scratch)


def missing(hub: Path, files: Files) -> str | None:
    """What a reader of the published rows would miss: each file is told by its name and the SHA-256 of its content."""
    found = _published(hub)
    for row, wanted in enumerate(files.rows):
        got = next(found, None)
        if got != wanted:
            return f"row {row:,} is not what was given" if got else f"{row:,} rows where {len(files.rows):,} were given"
    return "there are more rows than were given" if next(found, None) else None


def _published(hub: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    from penstock.testing.repos import Blobs, Repos

    repo = Repos(hub).find("datasets", REPO)
    if repo is None:
        return
    tree = repo.commit(repo.refs["refs/heads/main"]).tree
    for path in sorted(name for name in tree if name.endswith(".parquet")):
        with pq.ParquetFile(Blobs(hub).path(tree[path]["sha256"]), pre_buffer=False, buffer_size=PART) as shard:
            for batch in shard.iter_batches(1, use_threads=False):
                columns = zip(batch.schema.names, batch.columns, strict=True)
                yield {name: _told(column[0]) for name, column in columns}


def _told(value: Any) -> Any:
    """A value with each file's name and digest in its place. `as_py` would hold the file twice."""
    import pyarrow as pa

    if value.is_valid and pa.types.is_list(value.type):
        return [_told(one) for one in value.values]
    if value.is_valid and pa.types.is_struct(value.type):
        return os.path.basename(value["path"].as_py()), hashlib.sha256(value["bytes"].as_buffer()).hexdigest()
    return value.as_py()


def _all_sent(hub: Path, files: Files) -> str | None:
    """The Hub has checked the digests itself."""
    stored = sum(path.stat().st_size for path in files_of(hub / "blobs") if path.stat().st_size > 1 << 20)
    return None if stored == files.bytes else f"{stored:,} bytes where {files.bytes:,} were given"


# -- the first table --------------------------------------------------------------------------------------------------


def make_cases(files: Files, work: Path, shard_bytes: int, only: set[str]) -> list[Case]:
    """The least there is to do, then ours, then the peers; `only` holds tools, none for all."""
    rows, shards = len(files.rows), -(-files.bytes // shard_bytes)
    source, size = str(files.table), str(shard_bytes)
    ours: dict[str, list[str]] = {
        f"penstock push, {COMMAND_BUDGET}": [
            *(sys.executable, "-c", PENSTOCK, "push", source, REPO, "--media", "scan=nifti"),
            *("--max-shard-size", size, "--memory", COMMAND_BUDGET),
        ],
        f"penstock, ps.push(hf_dataset), {CALL_BUDGET}": in_fresh_process(penstock_call, source, size, CALL_BUDGET),
    }
    peers = {
        "datasets, push_to_hub": in_fresh_process(datasets_push, source, size),
        f"datasets, push_to_hub, num_shards={shards}": in_fresh_process(datasets_push, source, size, shards),
        f"datasets, push_to_hub, num_shards={rows}": in_fresh_process(datasets_push, source, size, rows),
        f"arc-bids, num_shards={shards}": in_fresh_process(arc_bids_loop, source, size, shards),
        f"arc-bids, num_shards={rows} (its own choice)": in_fresh_process(arc_bids_loop, source, size, rows),
    }
    bounds = {
        "limit (hashed while sent)": in_fresh_process(hash_while_sending, source, size),
        "limit (hashed, then sent)": in_fresh_process(hash_then_send, source, size),
    }

    def case(name: str, command: Sequence[str]) -> Case:
        bound = name in bounds
        return Case(
            name,
            command,
            output=_hub(work),
            check=lambda hub: _all_sent(hub, files) if bound else missing(hub, files),
            ours=name in ours,
            bound=bound,
            scratch=_scratch(work),
            beside=lambda: fresh_hub(work),
        )

    commands = {**bounds, **ours, **peers}
    return [case(name, command) for name, command in commands.items() if not only or _tool(name) in only]


TOOLS = ("limit", "penstock", "datasets", "arc-bids", LIMITED)


def _tool(name: str) -> str:
    return name.split(",")[0].split()[0]


def _read_once(files: Files) -> None:
    """So that every case finds the page cache alike: some leave what they have read there, Penstock does not."""
    for path in files_of(files.table.parent):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 22):
                pass


# -- the second table -------------------------------------------------------------------------------------------------


def in_a_limit(files: Files, work: Path, shard_bytes: int) -> str:
    """Each way once, in a kernel memory limit; what became of it, as a table."""
    limits = _limits()
    if reason := limits.kernel_limits_available():
        return f"Not run: no kernel memory limit can be set here ({reason}).\n"
    source, size, rows = str(files.table), str(shard_bytes), len(files.rows)
    ways = {
        f"ps.push(hf_dataset, memory={LIMIT_BUDGET!r})": in_fresh_process(penstock_call, source, size, LIMIT_BUDGET),
        "hf_dataset.push_to_hub": in_fresh_process(datasets_push, source, size),
        f"hf_dataset.push_to_hub, num_shards={rows}": in_fresh_process(datasets_push, source, size, rows),
    }
    shown = [["", "ended", "kernel kills", "seconds", "MB", "scratch MB", "output MB"]]
    for name, command in ways.items():
        _read_once(files)
        os.sync()
        with fresh_hub(work) as env, watched(_scratch(work)) as highest:
            run = limits.run_limited(command, limit=_bytes(LIMIT_BUDGET), timeout=7_200, env=env)
        ended = _ended(run.returncode, run.stderr) or missing(_hub(work), files) or f"all {files.count:,} files there"
        stored = bytes_in(_hub(work) / "blobs")
        shutil.rmtree(_hub(work))
        figures = [f"{run.seconds:,.1f}", f"{run.anonymous / 1e6:,.0f}", f"{highest() / 1e6:,.1f}"]
        shown.append([name, ended, str(run.kernel_kills), *figures, f"{stored / 1e6:,.0f}"])
        print(f"{name}: {ended}", file=sys.stderr, flush=True)
    return table(shown) + "\n"


def _limits() -> Any:
    """The kernel limits of the tests: what the promise is tested with is what it is shown with."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    import limits

    return limits


def _ended(returncode: int, stderr: str) -> str | None:
    if returncode < 0:
        return f"killed by signal {-returncode}"
    last = (stderr.strip().splitlines() or ["it said nothing"])[-1]
    return f"exit {returncode}: {last}" if returncode else None


def _bytes(text: str) -> int:
    from penstock.budget import parse_size

    return parse_size(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="a folder on a disk; what is put there goes at the end")
    parser.add_argument("--gb", type=float, default=4, help="of scans, in 10^9 bytes; three times as much disk is used")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limited-gb", type=float, default=8, help="of files of several kinds, for the second table")
    parser.add_argument("--limited-rows", type=int, default=200)
    parser.add_argument("--max-shard-size", type=_bytes, default=500_000_000)
    parser.add_argument("--only", default="", help=f"a comma-separated choice of {', '.join(TOOLS)} (the second table)")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file too")
    given = parser.parse_args()
    only = {name for name in given.only.split(",") if name}
    if unknown := only.difference(TOOLS):
        parser.error(f"--only: no such tool: {', '.join(sorted(unknown))}")
    given.to.mkdir(parents=True, exist_ok=True)
    if given.markdown:
        given.markdown.write_text("")
    if only != {LIMITED}:
        with tempfile.TemporaryDirectory(dir=given.to) as folder:
            first_table(Path(folder).resolve(), given, only)
    if not only or LIMITED in only:
        with tempfile.TemporaryDirectory(dir=given.to) as folder:
            second_table(Path(folder).resolve(), given)


def first_table(work: Path, given: argparse.Namespace, only: set[str]) -> None:
    from scans import make_scans

    files = make_scans(work / "source", bytes=int(given.gb * 1e9), rows=given.rows)
    compare(
        make_cases(files, work, given.max_shard_size, only),
        title=f"Publish {files.bytes / 1e6:,.0f} MB of scans in {len(files.rows):,} rows",
        repeat=given.repeats,
        before_each=lambda: _read_once(files),
        figures=FIGURES,
        markdown=given.markdown,
    )


def second_table(work: Path, given: argparse.Namespace) -> None:
    from scans import make_mixed

    files = make_mixed(work / "source", bytes=int(given.limited_gb * 1e9), rows=given.limited_rows)
    title = f"Publish {files.bytes / 1e6:,.0f} MB in {files.count:,} files and {len(files.rows):,} rows"
    about = "Columns Nifti, List(Nifti), Image and Pdf; each way once, MB by the kernel's count of anonymous memory."
    text = f"## {title}, in a kernel limit of {LIMIT_BUDGET}\n\n{machine()}\n\n{about}\n\n"
    text += in_a_limit(files, work, given.max_shard_size)
    print(text)
    if given.markdown:
        with given.markdown.open("a") as out:
            out.write(text if given.only == LIMITED else f"\n{text}")


if __name__ == "__main__":
    main()
