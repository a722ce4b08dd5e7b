"""A BIDS tree pushed to a Hub and exported from it: the same tree, and no shard fetched twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import ok, penstock, refused
from media.bids_tree import files_of, make_bids
from penstock.testing import LoopbackHub

PUSH = """
import sys, penstock as ps
ps.push(ps.read_bids(sys.argv[1], derivatives=True), "org/scans", max_shard_size="20kB")
"""
# Stops, as Ctrl-C would, when the third shard's turn comes.
STOP = """
import sys
from penstock.media.export import export
def watch(at):
    if "/00002-of-" in at.shard:
        raise KeyboardInterrupt
try:
    export("org/scans", sys.argv[1], bids=True, watch=watch)
except KeyboardInterrupt:
    print("stopped")
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as running:
        yield running


@pytest.fixture(scope="module")
def tree(hub: LoopbackHub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_bids(tmp_path_factory.mktemp("bids") / "ds")
    (root / ".bidsignore").write_text("")
    python(PUSH, root, env=hub.env() | {"PENSTOCK_STATE": str(root.parent / "state")})
    return root


def python(code: str, *words: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, env=os.environ | env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def fetched(hub: LoopbackHub) -> list[str]:
    """Names of the shards whose content was asked for."""
    return [
        one["path"].partition("?")[0].rpartition("/")[2]
        for one in hub.log()
        if one["method"] == "GET" and ".parquet" in one["path"]
    ]


def test_a_tree_comes_back_from_the_hub(hub: LoopbackHub, tree: Path, tmp_path: Path) -> None:
    ok(penstock("export", "org/scans", tmp_path / "back", "--bids", env=hub.env()))
    assert files_of(tmp_path / "back") == files_of(tree)
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == sorted(path.name for path in tree.iterdir())


def test_what_was_done_is_not_fetched_again(hub: LoopbackHub, tree: Path, tmp_path: Path) -> None:
    assert python(STOP, tmp_path / "back", env=hub.env()) == "stopped\n"
    hub.clear_log()
    made = ok(penstock("export", "org/scans", tmp_path / "back", "--bids", "--json", env=hub.env())).json()
    shards = sorted(name.rpartition("/")[2] for name in hub.files("org/scans") if name.endswith(".parquet"))
    assert len(shards) > 3
    assert sorted(set(fetched(hub))) == shards[2:]
    assert files_of(tmp_path / "back") == files_of(tree)
    assert made["files"] == len(files_of(tree))
    assert 0 < made["written"] < made["files"]


def test_a_dataset_that_is_not_there(hub: LoopbackHub, tmp_path: Path) -> None:
    refused(penstock("export", "org/none", tmp_path / "x", env=hub.env()), 2, "org/none", "no such dataset on the Hub")
