"""Pipeline files: the same words as the Python calls, the same plan, the same bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import penstock as ps
from command import digests, make_parquet, ok, penstock, read_back
from penstock.errors import UsageError
from penstock.pipeline import load


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "source"
    make_parquet(folder, rows=2_000)
    return folder


def saved(folder: Path, text: str) -> Path:
    (folder / "p.yaml").write_text(text)
    return folder / "p.yaml"


def test_all_words(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_all.py").write_text(
        "def words(row):\n    return {'key': row['key'], 'words': len(row['text'].split())}\n"
        "def some(columns):\n    return [number % 2 == 0 for number in columns['words']]\n"
    )
    monkeypatch.setattr("sys.path", list(sys.path))
    made = load(
        saved(
            tmp_path,
            f"""
memory: 400MB
workers: 1
disk: 1GB
scratch: {tmp_path / "scratch"}
read: {{from: {source}, format: parquet, columns: [id, text]}}
steps:
  - rename: {{id: key}}
  - limit: 1000
  - sample: {{fraction: 0.5, seed: 7}}
  - map: {{fn: "mine_all:words", format: rows}}
  - filter: {{fn: "mine_all:some", format: python}}
  - select: [words, key]
  - drop: words
write: {{to: {tmp_path / "out"}, max_shard_size: 1MB, format: parquet, rewrite: true}}
""",
        )
    )
    assert made.to == str(tmp_path / "out")
    assert made.write == {"max_shard_size": "1MB", "format": "parquet", "rewrite": True}
    assert made.run == {"memory": "400MB", "workers": 1, "disk": "1GB", "scratch": str(tmp_path / "scratch")}
    table = pq.read_table(source)
    even = {row["id"] for row in table.to_pylist() if len(row["text"].split()) % 2 == 0}
    sampled = [row["id"] for row in ps.read(source).limit(1_000).sample(fraction=0.5, seed=7).rows()]
    assert [row["key"] for row in made.dataset.rows()] == [key for key in sampled if key in even]
    assert made.dataset.schema.names == ["key"]


def test_same_plan_as_the_python_calls(source: Path, tmp_path: Path) -> None:
    """What one began the other finds done."""
    dataset = ps.read(source).select(["id", "text"]).limit(900)
    dataset.write(tmp_path / "out", memory="400MB", max_shard_size="50kB")
    text = f"read: {source}\nsteps:\n  - select: [id, text]\n  - limit: 900\n"
    ran = ok(penstock("run", saved(tmp_path, text + f"write: {{to: {tmp_path / 'out'}, max_shard_size: 50kB}}\n")))
    assert ran.stdout.startswith("already done")


def test_run_plan_and_show(source: Path, tmp_path: Path) -> None:
    path = saved(tmp_path, f"read: '{source}/*.parquet'\nsteps:\n  - select: id\nwrite: out\nmemory: 300MB\n")
    planned = ok(penstock("plan", path, "--json", cwd=tmp_path)).json()
    assert (planned["steps"], planned["spliced"], planned["allowed"]) == (["select"], True, 300_000_000)
    shown = ok(penstock("show", path, "--json", "-n", "2", cwd=tmp_path)).json()
    assert shown == {"schema": {"id": "int64"}, "rows": [{"id": 0}, {"id": 1}]}
    ok(penstock("run", path, cwd=tmp_path))
    assert read_back(tmp_path / "out")["id"].to_pylist() == list(range(2_000))


def test_options_of_the_command_go_before_those_of_the_file(source: Path, tmp_path: Path) -> None:
    path = saved(tmp_path, f"read: {source}\nwrite: {tmp_path / 'out'}\nmemory: 5MB\n")
    assert penstock("run", path).returncode == 3
    assert ok(penstock("run", path, "--memory", "300MB", "--json")).json()["memory"]["allowed"] == 300_000_000
    before = digests(tmp_path / "out")
    assert ok(penstock("run", path, "--memory", "300MB", "--restart", "--json")).json()["already_done"] is False
    assert digests(tmp_path / "out") == before


def test_yaml_is_loaded_safely(source: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"read: !!python/object/apply:os.system ['touch {mark}']\nwrite: {tmp_path / 'out'}\n"
    with pytest.raises(UsageError, match="is not YAML"):
        load(saved(tmp_path, text))
    assert not mark.exists()


def test_no_steps(source: Path, tmp_path: Path) -> None:
    for steps in ("", "steps:\n", "steps: []\n"):
        made = load(saved(tmp_path, f"read: {source}\n{steps}write: {tmp_path / 'out'}\n"))
        assert made.dataset.count() == 2_000


@pytest.mark.parametrize("data", [b"\xff\xfe\x00read", b"", b"\x00"])
def test_file_that_is_no_text(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_bytes(data)
    with pytest.raises(UsageError, match=r"p\.yaml"):
        load(tmp_path / "p.yaml")


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").mkdir()
    with pytest.raises(UsageError, match=r"p\.yaml"):
        load(tmp_path / "p.yaml")
