"""What a push does: the plan it shows, the shards it makes of real bytes, and what `load_dataset` gives afterwards."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import command
import penstock as ps
from command import as_lines, make_parquet, ok, penstock, refused
from hubs import (
    Desk,
    digests,
    digests_of_paths,
    loaded,
    make_scans,
    make_table,
    nifti,
    nothing_done,
    nothing_sent_twice,
    png,
    row_group_bytes,
    scan_table,
)
from limits import require_kernel_limits, run_limited
from penstock.errors import UsageError

# -- the plan ---------------------------------------------------------------------------------------------------------


def sparse(folder: Path, count: int, size: int) -> list[Path]:
    """Files that are large and take no disk."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / f"scan-{at:04d}.nii" for at in range(count)]
    for path in made:
        path.touch()
        os.truncate(path, size)
    return made


def test_a_plan_counts_the_bytes_of_the_files_and_not_of_their_paths(at_hub: Desk) -> None:
    """902 sessions of 300 MB each: 270 GB, which `push_to_hub` took for one shard."""
    scans = sparse(at_hub.folder / "data", 902, 300_000_000)
    os.truncate(scans[7], 700_000_000)
    table = make_table(at_hub.folder / "data", {"id": list(range(902)), "scan": scans})
    words = ("push", table, at_hub.repo, "--media", "scan", "--memory", "300MB", "--dry-run")
    plan = ok(at_hub.run(*words, "--json")).json()
    total = 901 * 300_000_000 + 700_000_000
    assert plan["rows"] == {"train": 902}
    assert plan["bytes"]["train"] == pytest.approx(total, rel=1e-3)
    assert plan["bytes"]["train"] >= total
    assert plan["shards"] == {"train": 902}  # two rows would pass 500 MB
    assert plan["largest_row"]["train"] == pytest.approx(700_000_000, rel=1e-3)
    assert (plan["exists"], plan["private"], plan["disk"]) == (False, False, 0)
    assert 10 <= plan["commits"] <= 20
    assert plan["memory"]["projected"] <= plan["memory"]["allowed"] == 300_000_000
    said = ok(at_hub.run(*words)).stdout
    assert f"{at_hub.repo} (will be created, public)" in said
    assert "902 rows, 271 GB in 902 shards, largest row 700 MB" in said
    assert "of 300 MB allowed" in said
    assert "no scratch" in said
    assert "visible with the last one" in said
    nothing_done(at_hub)


def test_a_plan_says_what_is_there_and_that_it_will_be_private(at_hub: Desk) -> None:
    table = scan_table(at_hub.folder / "data", 2)
    words = ("push", table, at_hub.repo, "--media", "scan")
    assert "(will be created, private)" in ok(at_hub.run(*words, "--dry-run", "--private")).stdout
    ok(at_hub.run(*words, "--private"))
    assert at_hub.hub.state()["repos"][f"datasets/{at_hub.repo}"]["private"] is True
    assert "(exists, private)" in ok(at_hub.run(*words, "--dry-run")).stdout
    assert len(at_hub.commits()) == 1


def test_shards_of_a_number_and_of_a_size_are_planned_by_bytes(at_hub: Desk) -> None:
    scans = [*sparse(at_hub.folder / "a", 4, 50_000_000), *sparse(at_hub.folder / "b", 40, 5_000_000)]
    table = make_table(at_hub.folder, {"scan": scans})
    words = ("push", table, at_hub.repo, "--media", "scan", "--dry-run", "--json")
    assert ok(at_hub.run(*words, "--num-shards", "8")).json()["shards"] == {"train": 8}
    assert ok(at_hub.run(*words, "--num-shards", "1")).json()["shards"] == {"train": 1}
    assert ok(at_hub.run(*words, "--max-shard-size", "50MB")).json()["shards"]["train"] in (8, 9)
    refused(at_hub.run(*words[:-1], "--num-shards", "2", "--max-shard-size", "1MB"), 2, "pass one of them")


def test_a_row_too_large_to_be_read_is_named_at_plan_time(at_hub: Desk) -> None:
    """A value, and all values of one list, end up in one Arrow buffer of at most 2 GiB; a row may be larger."""
    scans = sparse(at_hub.folder / "data", 3, 1_200_000_000)
    words = ("--dry-run", "--json")
    apart = make_table(at_hub.folder, {"a": [scans[0]], "b": [scans[1]]}, name="apart.jsonl")
    plan = ok(at_hub.run("push", apart, at_hub.repo, "--media", "a", "--media", "b", *words)).json()
    assert plan["largest_row"]["train"] == pytest.approx(2_400_000_000, rel=1e-3)
    listed = make_table(at_hub.folder, {"scans": [[scans[0]], [scans[1], scans[2]]]}, name="listed.jsonl")
    refused(
        at_hub.run("push", listed, at_hub.repo, "--media", "scans", "--dry-run"), 2, "row 1", "2.4 GB", "--row file"
    )
    os.truncate(scans[2], 2_300_000_000)
    single = make_table(at_hub.folder, {"scan": scans}, name="single.jsonl")
    refused(
        at_hub.run("push", single, at_hub.repo, "--media", "scan", "--dry-run"), 2, "row 2", "scan-0002.nii", "2.15 GB"
    )
    nothing_done(at_hub)


# -- media ------------------------------------------------------------------------------------------------------------


def make_everything(folder: Path, rows: int) -> dict[str, list[Any]]:
    """A row of every kind of column, lists of none to three, nulls and empty lists among them."""
    scans = [nifti(folder / f"scan-{at}.nii.gz", seed=at) for at in range(rows)]
    runs = [
        [nifti(folder / f"run-{at}-{run}.nii.gz", seed=at * 10 + run) for run in range(at % 4)] for at in range(rows)
    ]
    pictures = [png(folder / f"picture-{at}.png", seed=at) for at in range(rows)]
    slices = [[png(folder / f"slice-{at}-{n}.png", seed=at * 7 + n) for n in range(at % 3)] for at in range(rows)]
    papers = make_scans(folder, rows, ending=".pdf", size=900)
    blobs = make_scans(folder, rows, ending=".bin", size=500)
    table: dict[str, list[Any]] = {
        "id": list(range(rows)),
        "scan": scans,
        "runs": runs,
        "picture": pictures,
        "slices": slices,
        "paper": papers,
        "blob": blobs,
    }
    for name, at in (("scan", 1), ("runs", 2), ("picture", 3), ("slices", 4), ("paper", 5), ("blob", 6)):
        table[name][at] = None
    assert table["runs"][0] == [] == table["slices"][0]
    return table


MEDIA = {"scan": "nifti", "runs": "nifti", "picture": "image", "slices": "image", "paper": "pdf", "blob": "bytes"}


def as_text(table: dict[str, list[Any]]) -> dict[str, list[Any]]:
    def text(value: Any) -> Any:
        if isinstance(value, list):
            return [text(one) for one in value]
        return str(value) if isinstance(value, Path) else value

    return {name: [text(value) for value in column] for name, column in table.items()}


def kinds_of(features: Any) -> dict[str, str]:
    return {
        name: f"List({type(one.feature).__name__})" if type(one).__name__ == "List" else type(one).__name__
        for name, one in features.items()
    }


def test_every_kind_of_column_comes_back_byte_for_byte(at_hub: Desk) -> None:
    table = make_everything(at_hub.folder / "data", 40)
    pushed = ps.push(ps.read_files(as_text(table), media=MEDIA), at_hub.repo, max_shard_size="15KB")
    shards = at_hub.shards()
    assert len(shards) == len(pushed.shards) > 5
    for path in shards:
        about = pq.read_metadata(path)
        real = sum(about.row_group(at).total_byte_size for at in range(about.num_row_groups))
        assert real <= 15_000 or about.num_rows == 1
    import datasets

    whole = datasets.load_dataset(at_hub.repo, split="train")
    assert kinds_of(whole.features) == {
        "id": "Value", "scan": "Nifti", "runs": "List(Nifti)", "picture": "Image", "slices": "List(Image)",
        "paper": "Pdf", "blob": "Value",
    }  # fmt: skip
    assert whole.features["blob"].dtype == "binary"
    assert whole["picture"][0].size == (8, 8)
    assert whole["scan"][0].shape == (4, 4, 4)
    assert [scan.shape for scan in whole["runs"][3]] == [(4, 4, 4)] * 3
    back = loaded(at_hub, split="train")
    assert back["id"][:] == table["id"]
    for name in MEDIA:
        assert digests(back[name][:]) == digests_of_paths(table[name]), name
    assert (back[0]["runs"], back[2]["runs"], back[0]["slices"], back[4]["slices"]) == ([], None, [], None)
    assert back[0]["scan"]["path"] == "scan-0.nii.gz"
    nothing_sent_twice(at_hub)


def test_ids_are_read_without_touching_the_media(at_hub: Desk) -> None:
    class Counted(io.BytesIO):
        read_bytes = 0

        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            self.read_bytes += len(data)
            return data

    scans = make_scans(at_hub.folder / "data", 6, size=400_000)
    ps.push(ps.read_files({"id": list(range(6)), "scan": [str(path) for path in scans]}, media=["scan"]), at_hub.repo)
    (shard,) = at_hub.shards()
    opened = Counted(shard.read_bytes())
    assert pq.ParquetFile(opened, pre_buffer=False).read(["id"])["id"].to_pylist() == list(range(6))
    assert opened.read_bytes < 100_000 < 2_400_000 < len(opened.getvalue())  # a footer is read 64 KiB at a time
    paths = pq.ParquetFile(shard).read(["scan.path"])
    assert [one["path"] for one in paths["scan"].to_pylist()] == [path.name for path in scans]


WITHOUT_DATASETS = """
import sys
sys.modules["datasets"] = None  # importing it raises
opened = []
media = sys.argv.pop()
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
from penstock.cli.main import main
code = main(sys.argv[1:])
import collections, json
print(json.dumps(collections.Counter(path for path in opened if path.startswith(media))))
sys.exit(code)
"""


def test_it_works_without_datasets_and_opens_each_file_once_to_hash_and_once_to_send(desk: Desk) -> None:
    scans = make_scans(desk.folder / "data", 8, size=3_000)
    table = make_table(desk.folder, {"id": list(range(8)), "scan": scans})
    words = ["push", str(table), desk.repo, "--media", "scan=nifti", "--max-shard-size", "4KB"]
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_DATASETS, *words, str(desk.folder / "data")],
        env={**os.environ, **desk.env()}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "published" in ran.stdout
    assert json.loads(ran.stdout.splitlines()[-1]) == {str(path): 2 for path in scans}
    assert len(desk.shards()) == 8
    stated = json.loads(pq.read_schema(desk.shards()[0]).metadata[b"huggingface"])["info"]["features"]
    assert stated["scan"]["_type"] == "Nifti"


# -- what a user holds ------------------------------------------------------------------------------------------------


def test_a_hugging_face_dataset_of_paths(at_hub: Desk) -> None:
    import datasets

    table = make_everything(at_hub.folder / "data", 12)
    del table["blob"]
    table["label"] = [at % 2 for at in range(12)]
    features = datasets.Features(
        {
            "id": datasets.Value("int32"),
            "scan": datasets.Nifti(),
            "runs": datasets.List(datasets.Nifti()),
            "picture": datasets.Image(),
            "slices": datasets.List(datasets.Image()),
            "paper": datasets.Pdf(),
            "label": datasets.ClassLabel(names=["control", "stroke"]),
        }
    )
    held = datasets.Dataset.from_dict(as_text(table), features=features)
    pushed = ps.push(held, at_hub.repo, max_shard_size="10KB")
    assert pushed.rows["written"] == 12
    back = loaded(at_hub, split="train")
    assert kinds_of(back.features) == kinds_of(features)
    assert back.features["id"] == features["id"]
    assert back.features["label"] == features["label"]
    for name in ("scan", "runs", "picture", "slices", "paper"):
        assert digests(back[name][:]) == digests_of_paths(table[name]), name
    assert back["label"][:] == table["label"]


def test_a_dataset_dict_is_one_transaction(at_hub: Desk) -> None:
    import datasets

    scans = [str(path) for path in make_scans(at_hub.folder / "data", 9)]
    features = datasets.Features({"scan": datasets.Nifti()})
    held = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_dict({"scan": scans[:6]}, features=features),
            "test": datasets.Dataset.from_dict({"scan": scans[6:]}, features=features),
        }
    )
    pushed = ps.push(held, at_hub.repo)
    assert pushed.published is not None
    assert (pushed.published["splits"], pushed.published["commits"]) == (["train", "test"], 1)
    assert len(at_hub.commits()) == 1
    back = loaded(at_hub)
    assert {name: digests(one["scan"][:]) for name, one in back.items()} == {
        "train": digests_of_paths(scans[:6]),
        "test": digests_of_paths(scans[6:]),
    }
    info = at_hub.card()["dataset_info"]
    assert [(one["name"], one["num_examples"]) for one in info["splits"]] == [("train", 6), ("test", 3)]
    with pytest.raises(UsageError, match="leave split= out"):
        ps.push(held, at_hub.repo, split="train")


def test_a_dict_of_datasets_is_one_transaction(at_hub: Desk) -> None:
    scans = [str(path) for path in make_scans(at_hub.folder / "data", 5)]
    ps.push(
        {
            "train": ps.read_files({"scan": scans[:3]}, media=["scan"]),
            "validation": ps.read_files({"scan": scans[3:]}, media=["scan"]),
        },
        at_hub.repo,
    )
    assert len(at_hub.commits()) == 1
    back = loaded(at_hub)
    assert {name: len(one) for name, one in back.items()} == {"train": 3, "validation": 2}


def test_other_splits_and_configs_stay_and_what_is_replaced_goes(at_hub: Desk) -> None:
    from huggingface_hub import HfApi

    scans = make_scans(at_hub.folder / "data", 12)

    def dataset(*which: int) -> ps.Dataset:
        return ps.read_files({"id": list(which), "scan": [str(scans[at]) for at in which]}, media=["scan"])

    ps.push(dataset(0, 1, 2), at_hub.repo, max_shard_size="3KB")
    ps.push(dataset(3, 4), at_hub.repo, split="test")
    ps.push(dataset(5), at_hub.repo, config_name="small")
    HfApi(token="hf_writer").upload_file(
        path_or_fileobj=b"mine\n", path_in_repo="notes/mine.txt", repo_id=at_hub.repo, repo_type="dataset"
    )
    before = at_hub.files()
    ps.push(dataset(6, 7, 8, 9), at_hub.repo, max_shard_size="3KB")
    after = at_hub.files()
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    assert {path.rpartition("/")[0].rpartition("-")[0] or path for path in changed} == {
        "README.md", "data/train", ".penstock/default/train.json",
    }  # fmt: skip
    assert sum(path.startswith("data/train-") for path in before) == 3
    assert sum(path.startswith("data/train-") for path in after) == 4
    assert not {path for path in before if path.startswith("data/train-")} & set(after)
    assert after["notes/mine.txt"] == before["notes/mine.txt"]
    back = loaded(at_hub, "default")
    assert {name: one["id"][:] for name, one in back.items()} == {"train": [6, 7, 8, 9], "test": [3, 4]}
    assert loaded(at_hub, "small")["train"]["id"][:] == [5]


def test_what_push_to_hub_left_is_taken_over_and_the_other_way_round(at_hub: Desk) -> None:
    import datasets

    def held(*ids: int) -> Any:
        return datasets.Dataset.from_dict({"id": list(ids)})

    held(1, 2).push_to_hub(at_hub.repo, split="train")
    held(3).push_to_hub(at_hub.repo, split="test")
    old = [path for path in at_hub.files() if path.startswith("data/train-")]
    ps.push(held(4, 5, 6), at_hub.repo)
    assert old != []
    assert not set(old) & set(at_hub.files())
    back = loaded(at_hub)
    assert {name: one["id"][:] for name, one in back.items()} == {"train": [4, 5, 6], "test": [3]}
    held(7, 8).push_to_hub(at_hub.repo, split="test")
    back = loaded(at_hub)
    assert {name: one["id"][:] for name, one in back.items()} == {"train": [4, 5, 6], "test": [7, 8]}
    ps.push(held(9), at_hub.repo, split="test")
    back = loaded(at_hub)
    assert {name: one["id"][:] for name, one in back.items()} == {"train": [4, 5, 6], "test": [9]}
    assert sum(path.endswith(".parquet") for path in at_hub.files()) == 2


def test_the_same_push_again_finds_it_already_there(at_hub: Desk) -> None:
    table = scan_table(at_hub.folder / "data", 4)
    words = ("push", table, at_hub.repo, "--media", "scan")
    first = ok(at_hub.run(*words))
    assert f"published {at_hub.repo} (train): 4 rows in 1 shard" in first.stdout
    assert "1 commit," in first.stdout
    assert at_hub.left() == ["receipt.json"]
    at_hub.hub.clear_log()
    again = ok(at_hub.run(*words))
    assert again.stdout.startswith(f"already there: {at_hub.repo} (train) holds 4 rows in 1 shard")
    assert ok(at_hub.run(*words, "--json")).json()["already_done"] is True
    assert len(at_hub.commits()) == 1
    assert at_hub.asked("PUT|/commit/", answered=False) == []
    # From another machine, whose state folder knows nothing of it.
    elsewhere = Desk(at_hub.hub, at_hub.forks, at_hub.folder / "elsewhere", at_hub.repo, here=True)
    elsewhere.folder.mkdir()
    ok(elsewhere.run(*words))
    ok(elsewhere.run(*words, "--restart"))
    assert len(at_hub.commits()) == 1
    assert at_hub.asked("PUT|/commit/", answered=False) == []


def test_what_was_taken_away_on_the_hub_is_pushed_again(at_hub: Desk) -> None:
    from huggingface_hub import HfApi

    table = scan_table(at_hub.folder / "data", 4)
    words = ("push", table, at_hub.repo, "--media", "scan", "--max-shard-size", "3KB")
    ok(at_hub.run(*words))
    before = at_hub.files()
    gone = min(path for path in before if path.endswith(".parquet"))
    HfApi(token="hf_writer").delete_file(gone, at_hub.repo, repo_type="dataset")
    ok(at_hub.run(*words))
    assert at_hub.files() == before


# -- a budget ---------------------------------------------------------------------------------------------------------


def test_rows_larger_than_the_budget_in_a_kernel_limit_that_is_the_budget(at_hub: Desk) -> None:
    require_kernel_limits()
    scans = make_scans(at_hub.folder / "data", 3, size=60_000_000)
    table = make_table(at_hub.folder, {"id": [0, 1], "runs": [scans, scans[:0]]})
    words = ["push", table, at_hub.repo, "--media", "runs", "--memory", "140MB", "--disk", "10MB", "--json"]
    ran = run_limited(
        [sys.executable, "-m", "penstock.cli.main", *map(str, words)],
        limit=140_000_000, timeout=120, env={**os.environ, **at_hub.env()},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert (ran.kernel_kills, ran.left) == (0, 0)
    made = json.loads(ran.stdout)
    memory = made["memory"]
    assert memory["measured"] <= memory["projected"] <= memory["allowed"] == 140_000_000
    assert memory["measured"] == pytest.approx(ran.anonymous, rel=0.15, abs=8_000_000)
    assert made["disk"]["measured"] == 0
    assert at_hub.left() == ["receipt.json"]
    assert list((at_hub.state / "tables").iterdir()) == []
    (shard,) = at_hub.shards()
    with pq.ParquetFile(shard) as file:
        found = [row for batch in file.iter_batches(1) for row in digests(batch["runs"].to_pylist())]
    assert found == digests_of_paths([scans, []])
    nothing_sent_twice(at_hub)


def test_a_budget_too_small_is_refused_before_anything_is_sent(at_hub: Desk) -> None:
    table = scan_table(at_hub.folder / "data", 2)
    ran = at_hub.run("push", table, at_hub.repo, "--media", "scan", "--memory", "30MB")
    said = refused(ran, 3, "--memory 30MB does not hold it", "the smallest budget that works is --memory ")
    nothing_done(at_hub)
    ok(at_hub.run("push", table, at_hub.repo, "--media", "scan", "--memory", said.split()[-1]))


# -- plain Parquet ----------------------------------------------------------------------------------------------------


def test_a_folder_of_parquet_is_spliced_and_nothing_is_written_down(at_hub: Desk) -> None:
    table = make_parquet(at_hub.folder / "data", rows=3_000, files=3, groups=4)
    done = ok(at_hub.run("push", at_hub.folder / "data", at_hub.repo, "--max-shard-size", "100KB", "--json")).json()
    assert done["disk"]["measured"] == 0
    assert not (at_hub.state / "tables").exists()
    sources = sorted((at_hub.folder / "data").glob("*.parquet"))
    shards = at_hub.shards()
    assert len(shards) > 3
    chunks = [list(row_group_bytes(path)) for path in (*sources, *shards)]
    assert list(chain.from_iterable(chunks[3:])) == list(chain.from_iterable(chunks[:3]))
    back = loaded(at_hub, split="train")
    assert back.data.table.combine_chunks().replace_schema_metadata(None) == table.combine_chunks()
    assert {name: one.dtype for name, one in back.features.items()} == {
        "id": "int64", "text": "string", "score": "float64",
    }  # fmt: skip
    assert back.info.splits["train"].num_examples == 3_000


def test_features_in_the_files_of_a_parquet_folder_are_kept(at_hub: Desk) -> None:
    import datasets

    features = datasets.Features(
        {"label": datasets.ClassLabel(names=["a", "b"]), "picture": datasets.Image(), "text": datasets.Value("string")}
    )
    picture = png(at_hub.folder / "p.png", seed=0)
    rows = {"label": [0, 1], "picture": [{"bytes": picture.read_bytes(), "path": "p.png"}, None], "text": ["x", None]}
    (at_hub.folder / "data").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(at_hub.folder / "data" / "a.parquet")
    ok(at_hub.run("push", at_hub.folder / "data", at_hub.repo))
    back = datasets.load_dataset(at_hub.repo, split="train")
    assert back.features == features
    assert back[0]["picture"].size == (8, 8)
    assert back[1]["picture"] is None


def test_an_arrow_table_and_a_frame_are_pushed_as_they_are(at_hub: Desk) -> None:
    import pandas

    table = pa.table({"id": [1, 2, 3], "words": [["a"], [], None]})
    ps.push(table, at_hub.repo)
    assert loaded(at_hub, split="train").to_list() == table.to_pylist()
    ps.push(pandas.DataFrame({"id": [4], "words": [["b", "c"]]}), at_hub.repo)
    assert loaded(at_hub, split="train").to_list() == [{"id": 4, "words": ["b", "c"]}]


# -- rows that must be made -------------------------------------------------------------------------------------------


def test_json_lines_are_built_in_the_budget_and_what_was_built_goes(at_hub: Desk) -> None:
    table = command.make_table(3_000)
    (at_hub.folder / "data").mkdir()
    for at in range(2):
        (at_hub.folder / "data" / f"{at}.jsonl").write_text(as_lines(table.slice(at * 1_500, 1_500)))
    at_hub.here = False  # no caller's heap beside it
    words = ("push", at_hub.folder / "data", at_hub.repo, "--max-shard-size", "100KB", "--memory", "300MB")
    plan = ok(at_hub.run(*words, "--dry-run")).stdout
    assert "709 kB to read" in plan
    assert "about 8 shards" in plan
    assert "of scratch" in plan
    done = ok(at_hub.run(*words, "--json")).json()
    assert len(done["shards"]) == len(at_hub.shards()) > 3
    assert done["disk"]["measured"] > 0
    memory = done["memory"]
    assert memory["measured"] <= memory["projected"] <= memory["allowed"] == 300_000_000
    assert at_hub.left() == ["receipt.json"]
    back = loaded(at_hub, split="train")
    assert back.to_list() == table.to_pylist()
    before = at_hub.files()
    ok(at_hub.run(*words, "--restart"))
    assert at_hub.files() == before
    assert len(at_hub.commits()) == 1
    nothing_sent_twice(at_hub)


def test_steps_on_a_table_of_media_keep_the_media(at_hub: Desk) -> None:
    table = make_everything(at_hub.folder / "data", 12)
    held = ps.read_files(as_text(table), media=MEDIA)
    even = held.filter(lambda row: row["id"] % 2 == 0, format="rows").rename({"scan": "t1w"}).drop("paper")
    pushed = even.push(at_hub.repo, max_shard_size="10KB")
    assert pushed.rows["written"] == 6
    back = loaded(at_hub, split="train")
    assert kinds_of(back.features) == {
        "id": "Value", "t1w": "Nifti", "runs": "List(Nifti)", "picture": "Image", "slices": "List(Image)",
        "blob": "Value",
    }  # fmt: skip
    assert back["id"][:] == table["id"][::2]
    for name, column in (("scan", "t1w"), ("runs", "runs"), ("slices", "slices"), ("blob", "blob")):
        assert digests(back[column][:]) == digests_of_paths(table[name][::2]), name
    assert len(at_hub.shards()) > 1


def test_columns_alone_need_no_building(at_hub: Desk) -> None:
    table = make_everything(at_hub.folder / "data", 8)
    held = ps.read_files(as_text(table), media=MEDIA).select(["runs", "id"]).rename({"runs": "bold"})
    pushed = held.push(at_hub.repo, max_shard_size="2KB")
    assert pushed.disk["measured"] == 0
    back = loaded(at_hub, split="train")
    assert back.column_names == ["bold", "id"]
    assert digests(back["bold"][:]) == digests_of_paths(table["runs"])
    names = set(pq.read_schema(at_hub.shards()[0]).names)
    assert names == {"bold", "id"}


def test_no_rows_at_all_are_one_shard_that_has_the_columns(at_hub: Desk) -> None:
    """`load_dataset` refuses a split of no rows, whoever pushed it; other readers do not."""
    make_parquet(at_hub.folder / "data", rows=50, files=1)
    ps.read(at_hub.folder / "data").filter(lambda row: False, format="rows").push(at_hub.repo)
    (shard,) = at_hub.shards()
    found = pq.read_table(shard)
    assert (len(found), found.column_names) == (0, ["id", "text", "score"])
    assert at_hub.card()["dataset_info"]["splits"][0]["num_examples"] == 0


# -- keywords ---------------------------------------------------------------------------------------------------------


def test_a_config_in_a_folder_of_its_own_made_the_default(at_hub: Desk) -> None:
    one, two = pa.table({"id": [1]}), pa.table({"id": [2]})
    ps.push(one, at_hub.repo, config_name="first", data_dir="stuff/here", commit_message="One")
    ps.push(
        two, at_hub.repo, config_name="second", set_default=True, split="test", commit_message="Two",
        commit_description="at length",
    )  # fmt: skip
    titles = [(commit["title"], commit["description"]) for commit in at_hub.commits()]
    assert titles == [("One", ""), ("Two", "at length")]
    folders = {path.split("-")[0] for path in at_hub.files() if path.endswith(".parquet")}
    assert folders == {"stuff/here/train", "second/test"}
    assert {one["config_name"]: one.get("default") for one in at_hub.card()["configs"]} == {
        "first": None, "second": True,
    }  # fmt: skip
    assert loaded(at_hub)["test"]["id"][:] == [2]
    assert loaded(at_hub, "first")["train"]["id"][:] == [1]


def test_a_branch_that_is_not_there_is_made(at_hub: Desk) -> None:
    ps.push(pa.table({"id": [1]}), at_hub.repo)
    ps.push(pa.table({"id": [2]}), at_hub.repo, revision="next")
    assert loaded(at_hub, split="train", revision="next")["id"][:] == [2]
    assert loaded(at_hub, split="train")["id"][:] == [1]
    ps.push(pa.table({"id": [3]}), at_hub.repo, revision="next")
    assert loaded(at_hub, split="train", revision="next")["id"][:] == [3]
    assert len(at_hub.shards(revision="next")) == 1


def test_a_branch_of_a_repository_that_is_not_there_is_made(at_hub: Desk) -> None:
    ps.push(pa.table({"id": [1]}), at_hub.repo, revision="next")
    assert loaded(at_hub, split="train", revision="next")["id"][:] == [1]
    assert at_hub.shards() == []


def test_a_pull_request_leaves_the_branch_alone(at_hub: Desk) -> None:
    scans = [str(path) for path in make_scans(at_hub.folder / "data", 99, size=300)]
    ps.push(pa.table({"id": [1]}), at_hub.repo)
    before = at_hub.files()
    dataset = ps.read_files({"id": list(range(99)), "scan": scans}, media=["scan"])
    pushed = ps.push(dataset, at_hub.repo, config_name="scans", create_pr=True, max_shard_size="400")
    assert at_hub.files() == before
    assert pushed.published is not None
    assert (pushed.published["revision"], pushed.published["commits"]) == ("refs/pr/1", 2)
    back = loaded(at_hub, "scans", split="train", revision="refs/pr/1")
    assert digests(back["scan"][:]) == digests_of_paths(scans)


def test_anybody_may_open_a_pull_request(at_hub: Desk) -> None:
    ps.push(pa.table({"id": [1]}), at_hub.repo)
    ps.push(pa.table({"id": [2]}), at_hub.repo, create_pr=True, token="hf_stranger")
    assert loaded(at_hub, split="train", revision="refs/pr/1")["id"][:] == [2]
    assert at_hub.says("hf_stranger") == []


def test_a_pull_request_can_be_gone_on_with(at_hub: Desk) -> None:
    ps.push(pa.table({"id": [1]}), at_hub.repo)
    ps.push(pa.table({"id": [2]}), at_hub.repo, create_pr=True)
    ps.push(pa.table({"id": [3]}), at_hub.repo, split="test", revision="refs/pr/1")
    back = loaded(at_hub, revision="refs/pr/1")
    assert {name: one["id"][:] for name, one in back.items()} == {"train": [2], "test": [3]}
    assert loaded(at_hub)["train"]["id"][:] == [1]


def test_so_many_shards(at_hub: Desk) -> None:
    scans = [str(path) for path in make_scans(at_hub.folder / "data", 10, size=1_000)]
    pushed = ps.push(ps.read_files({"scan": scans}, media=["scan"]), at_hub.repo, num_shards=3)
    assert len(pushed.shards) == len(at_hub.shards()) == 3
    assert sum(shard["rows"] for shard in pushed.shards) == 10
    assert digests(loaded(at_hub, split="train")["scan"][:]) == digests_of_paths(scans)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"embed_external_files": False}, "always embedded"),
        ({"num_shards": 0}, "at least 1"),
        ({"num_shards": 2, "max_shard_size": "1MB"}, "pass one of them"),
        ({"split": "a b"}, "not a name the Hub takes"),
    ],
)
def test_keywords_that_make_no_sense(at_hub: Desk, given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ps.push(pa.table({"id": [1]}), at_hub.repo, **given)
    nothing_done(at_hub)


# -- the receipt ------------------------------------------------------------------------------------------------------


def test_a_receipt_travels_with_the_dataset_and_names_nobody(at_hub: Desk) -> None:
    table = scan_table(at_hub.folder / "data", 5)
    ok(at_hub.run("push", table, at_hub.repo, "--media", "scan", "--max-shard-size", "5KB"))
    found = at_hub.receipt()
    assert (found["config"], found["split"], found["rows"]) == ("default", "train", 5)
    files = at_hub.files()
    for shard in found["shards"]:
        assert files[shard["path"]] == shard["sha256"]
        assert at_hub.blob(shard["sha256"]).stat().st_size == shard["bytes"]
    assert sum(shard["rows"] for shard in found["shards"]) == 5
    for digest in at_hub.hub.files(at_hub.repo).values():
        assert str(at_hub.folder).encode() not in at_hub.blob(digest).read_bytes()


# -- before any work --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "repo", "says"),
    [
        (None, None, "no Hugging Face token"),
        ("hf_reader", None, "may only read"),
        ("hf_stranger", None, "may not write to org"),
        ("hf_wrong", None, "401"),
        ("hf_writer", "org/na me", "name it ORG/NAME"),
        ("hf_writer", "org/a/b", "name it ORG/NAME"),
        ("hf_writer", "org/-a", "name it ORG/NAME"),
        ("hf_writer", "nobody/set", "may not write to nobody"),
    ],
)
def test_what_would_stop_it_later_is_said_first(at_hub: Desk, token: str | None, repo: str | None, says: str) -> None:
    table = scan_table(at_hub.folder / "data", 2)
    ran = at_hub.run("push", table, repo or at_hub.repo, "--media", "scan", token=token)
    refused(ran, 2, says)
    nothing_done(at_hub)
    assert not (at_hub.state / "push").exists()
    if token is not None:
        assert token not in ran.stderr


def test_a_repository_one_may_read_and_not_write_is_said_first(at_hub: Desk) -> None:
    table = scan_table(at_hub.folder / "data", 2)
    ok(at_hub.run("push", table, at_hub.repo, "--media", "scan"))
    at_hub.hub.clear_log()
    ran = at_hub.run("push", table, at_hub.repo, "--media", "scan", "--split", "other", token="hf_stranger")
    refused(ran, 2, "may not write to org", "is no member of it")
    assert at_hub.asked("PUT|/commit/", answered=False) == []


def test_a_name_without_an_owner_is_the_users_own(at_hub: Desk) -> None:
    table = scan_table(at_hub.folder / "data", 2)
    name = at_hub.repo.split("/")[1]
    done = ok(at_hub.run("push", table, name, "--media", "scan", "--json")).json()
    assert done["published"]["to"] == f"writer/{name}"
    assert at_hub.hub.history(f"writer/{name}")


def test_the_command_a_person_types(desk: Desk) -> None:
    """Once with no shortcut: an interpreter of its own, from the words to the report."""
    table = scan_table(desk.folder / "data", 3)
    ran = ok(penstock("push", table, desk.repo, "--media", "scan", "--private", env=desk.env()))
    assert f"penstock verify {desk.repo}" in ran.stdout
    assert len(desk.shards()) == 1
