"""The card, judged by `datasets`: by its own push_to_hub's card, by its parsers, and by what load_dataset gives."""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import ClassLabel, DatasetInfo, Features, Image, List, Value, load_dataset
from datasets.arrow_dataset import _get_updated_dataset_card
from datasets.data_files import get_data_patterns, resolve_pattern
from datasets.exceptions import DataFilesNotFoundError
from datasets.info import DatasetInfosDict
from datasets.splits import SplitInfo
from datasets.utils.metadata import MetadataConfigs
from fsspec.implementations.dirfs import DirFileSystem  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from fsspec.utils import glob_translate  # type: ignore[import-untyped]
from huggingface_hub import CommitOperationAdd, DatasetCard, HfApi
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from hubs import Desk
from penstock.errors import BadFile, SchemaClash, UsageError
from penstock.publish.card import (
    Card,
    check_names,
    named_files,
    owned_files,
    pinned,
    read_card,
    referenced_patterns,
    split_files,
    visible_files,
    with_split,
)
from penstock.publish.features import features_of, huggingface_metadata
from penstock.publish.patterns import _regex, discovered, matching

FEATURES = Features(
    id=Value("int64"), label=ClassLabel(names=["no", "yes"]), image=Image(), texts=List(Value("string"))
)
OTHER = Features(id=Value("int64"), more=Value("string"))


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def put(
    card: Card,
    split: str = "train",
    *,
    config: str = "default",
    features: Features = FEATURES,
    rows: int = 3,
    size: int = 300,
    stored: int = 100,
    data_files: str | list[str] | None = None,
    **more: Any,
) -> Card:
    folder = "data" if config == "default" else config
    return with_split(
        card,
        config_name=config,
        split=split,
        data_files=data_files or f"{folder}/{split}-*",
        features=features.to_dict(),
        num_examples=rows,
        num_bytes=size,
        download_size=stored,
        **more,
    )


def pushed(
    folder: Path,
    split: str = "train",
    *,
    config: str = "default",
    features: Features = FEATURES,
    rows: int = 3,
    size: int = 300,
    stored: int = 100,
    default: bool | None = None,
    deleted: int = 0,
) -> str:
    """The card that push_to_hub itself would commit, the repository being a folder."""
    made, _ = _get_updated_dataset_card(
        fs=DirFileSystem(path=str(folder), fs=LocalFileSystem()),
        config_name=config,
        splits_info=[SplitInfo(split, num_bytes=size, num_examples=rows)],
        features=features,
        data_dir="data" if config == "default" else config,
        set_default=default,
        uploaded_sizes=[stored],
        deleted_sizes=[deleted],
        remove_other_splits=False,
    )
    return str(made)


def seen(text: str) -> dict[str, Any]:
    """The front matter as huggingface_hub finds it."""
    data: dict[str, Any] = vars(DatasetCard(text).data)
    return data


def parsed(card: Card) -> tuple[MetadataConfigs, DatasetInfosDict]:
    data = DatasetCard(card.render()).data
    return MetadataConfigs.from_dataset_card_data(data), DatasetInfosDict.from_dataset_card_data(data)


def write(folder: Path, card: Card) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(card.render(), encoding="utf-8", newline="")


def shard(path: Path, columns: dict[str, Any], features: Features | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = features.arrow_schema if features is not None else None
    pq.write_table(pa.table(columns, schema=schema), path)


# Beside push_to_hub ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["default", "scans"])
def test_a_first_split_is_to_the_byte_what_push_to_hub_writes(config: str, tmp_path: Path) -> None:
    assert put(read_card(None), config=config).render() == pushed(tmp_path, config=config)


def test_splits_and_configs_one_after_the_other_are_what_push_to_hub_writes(tmp_path: Path) -> None:
    card = read_card(None)
    steps: list[dict[str, Any]] = [
        {"split": "train"},
        {"split": "test", "rows": 1, "size": 7, "stored": 9},
        {"split": "train", "rows": 5, "size": 50, "stored": 60},
        {"split": "train", "config": "zebra", "features": OTHER},
        {"split": "extra.one", "config": "aardvark", "features": OTHER},
        {"split": "test", "config": "zebra", "features": OTHER, "stored": 1},
    ]
    for step in steps:
        theirs = pushed(tmp_path, **step)
        card = put(card, **step)
        assert card.render() == theirs
        card = read_card(theirs)
        write(tmp_path, card)
    configs, infos = parsed(card)
    assert list(configs) == ["aardvark", "default", "zebra"]
    assert infos["default"].splits["train"].num_examples == 5
    assert (infos["default"].dataset_size, infos["default"].download_size) == (57, 169)
    assert infos["zebra"].features == OTHER


def test_an_authors_card_is_kept_as_push_to_hub_keeps_it(tmp_path: Path) -> None:
    text = "---\nlicense: mit\ntags:\n- a\n- b\npretty_name: Ünïcode\n---\n# Title\n\ntext\n---\nmore\n"
    (tmp_path / "README.md").write_text(text)
    ours = put(read_card(text)).render()
    assert ours == pushed(tmp_path)
    assert ours.endswith("---\n# Title\n\ntext\n---\nmore\n")


def test_a_readme_without_front_matter(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Title\n\ntext\n")
    made = put(read_card("# Title\n\ntext\n")).render()
    assert made == pushed(tmp_path)
    assert made.endswith("---\n# Title\n\ntext\n")


def test_a_default_config_is_set_and_moved(tmp_path: Path) -> None:
    card = put(read_card(None), config="one", default=True)
    assert card.render() == pushed(tmp_path, config="one", default=True)
    write(tmp_path, card)
    card = put(card, config="two", default=True)
    assert card.render() == pushed(tmp_path, config="two", default=True)
    assert parsed(card)[0].get_default_config_name() == "two"
    again = put(card, config="two")
    assert parsed(again)[0].get_default_config_name() == "two"  # push_to_hub forgets it here
    assert "default" not in parsed(put(card, config="two", default=False))[0]["two"]
    with pytest.raises(UsageError, match=r"one named 'default'.*rename"):
        put(put(put(card, config="two", default=False)), config="two", default=True)
    with pytest.raises(UsageError, match=r"'two' is the default, and one named 'default' would be a second; publish"):
        put(card)


def test_a_new_config_takes_nothing_of_what_lies_there_for_others() -> None:
    card = put(read_card(None), "test")
    made = put(card, "train", config="other", files=["README.md", "data/test-00000-of-00001.parquet"])
    assert referenced_patterns(made)["other"] == {"train": ["other/train-*"]}


def test_other_features_beside_other_splits_are_refused(tmp_path: Path) -> None:
    card = put(put(read_card(None)), "test")
    write(tmp_path, card)
    with pytest.raises(ValueError, match="don't match"):
        pushed(tmp_path, features=OTHER)
    with pytest.raises(
        SchemaClash, match=r"config 'default' \(test\): label, image, texts, more differ; .*config_name"
    ):
        put(card, features=OTHER)
    both = put(
        put(card, features=OTHER, together=["train", "test"]), "test", features=OTHER, together=["train", "test"]
    )
    assert parsed(both)[1]["default"].features == OTHER


def test_an_only_split_may_change_its_features() -> None:
    """push_to_hub keeps the old ones in this case, and load_dataset fails to cast."""
    _, infos = parsed(put(put(read_card(None)), features=OTHER))
    assert infos["default"].features == OTHER


def test_order_of_columns_and_older_yaml_do_not_make_other_features() -> None:
    stated = [{"name": "texts", "sequence": "string"}, *FEATURES._to_yaml_list()[:3]]
    text = yaml.safe_dump(
        {"dataset_info": {"features": stated, "splits": [{"name": "test", "num_bytes": 1, "num_examples": 1}]}}
    )
    assert parsed(put(read_card(f"---\n{text}---\n")))[1]["default"].features == FEATURES


# What stays ----------------------------------------------------------------------------------------------------------


def test_settings_of_a_config_stay_and_its_data_dir_is_written_out() -> None:
    stated = {
        "configs": [
            {
                "config_name": "b",
                "data_dir": "deep/er",
                "data_files": [{"split": "test", "path": "t-*"}],
                "drop_labels": True,
            },
            {"config_name": "a", "data_files": "a/*.parquet", "default": True},
        ]
    }
    card = read_card(f"---\n{yaml.safe_dump(stated)}---\n")
    assert referenced_patterns(card) == {"b": {"test": ["deep/er/t-*"]}, "a": {"train": ["a/*.parquet"]}}
    made = put(card, config="b")
    assert made.data["configs"] == [
        {"config_name": "a", "data_files": "a/*.parquet", "default": True},
        {
            "config_name": "b",
            "data_files": [{"split": "test", "path": "deep/er/t-*"}, {"split": "train", "path": "b/train-*"}],
            "drop_labels": True,
        },
    ]  # fmt: skip


def test_a_split_moves_to_new_paths() -> None:
    card = put(put(read_card(None)), "test")
    made = put(card, data_files=["data/x1/a.parquet", "data/x1/b.parquet"])
    assert referenced_patterns(made)["default"] == {
        "train": ["data/x1/a.parquet", "data/x1/b.parquet"],
        "test": ["data/test-*"],
    }
    assert card == put(put(read_card(None)), "test")  # the one before is as it was


def test_comments_and_quotes_stay() -> None:
    front = (
        "# about this card\n"
        "license: 'cc0-1.0'  # as agreed\n"
        "\n"
        "# names\n"
        'pretty_name:    "A: name"\n'
        "configs:\n"
        "- config_name: default\n"
        "  data_files: old-*\n"
        "folded: >\n"
        "  one\n"
        "  # two\n"
        "# tags of ours\n"
        "tags: [a, 'b']\n"
    )
    made = put(read_card(f"---\n{front}---\n\n# Body\n")).render()
    for kept in ("# about this card\nlicense: 'cc0-1.0'  # as agreed\n\n# names\npretty_name:    \"A: name\"\n",
                 "folded: >\n  one\n  # two\n# tags of ours\ntags: [a, 'b']\n"):  # fmt: skip
        assert kept in made
    assert made.endswith("---\n\n# Body\n")
    assert read_card(made).data["folded"] == "one # two\n"
    assert list(read_card(made).data) == ["license", "pretty_name", "configs", "folded", "tags", "dataset_info"]
    assert read_card(made).render() == made


@pytest.mark.parametrize(
    "front",
    ["a: &x [1, 2]\nb: *x\n", "{a: 1, b: [2]}\n", "a: 1\na: 2\n", "a: |\n  last", "a: |+\n  last\n\n", "a: 1\n...\n",
     "? a\n: 1\n", "!!map\na: 1\n", "a: !!str 3\n", "# only\n# comments", "a: 1\n\n\n", "  a: 1\n  b: 2\n",
     "a:\n- 1\n# end"],
)  # fmt: skip
def test_front_matter_of_odd_form_keeps_its_meaning(front: str) -> None:
    text = f"---\n{front}{'' if front.endswith(chr(10)) else chr(10)}---\nbody"
    before = seen(text)
    made = put(read_card(text)).render()
    after = seen(made)
    assert {key: after[key] for key in before} == before
    assert parsed(read_card(made))[1]["default"].splits["train"].num_examples == 3
    assert read_card(made).render() == made


def test_line_ends_stay() -> None:
    made = put(read_card("---\r\nlicense: mit\r\n---\r\nbody\r\n")).render()
    assert "\n" not in made.replace("\r\n", "")
    assert made.endswith("---\r\nbody\r\n")
    assert parsed(read_card(made))[1]["default"].features == FEATURES


def test_a_byte_order_mark_hides_no_front_matter() -> None:
    card = read_card("\ufeff---\nlicense: mit\n---\nbody")
    assert (card.data, card.body) == ({"license": "mit"}, "body")


# PyYAML itself does not give back a text with one of the line ends that only Unicode has.
words = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\u2028\u2029\ufeff"), max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | words | st.floats(allow_nan=False) | st.dates(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(words, below, max_size=3),
    max_leaves=6,
)
keys = st.text("abcdefg_- #:'\"é", min_size=1, max_size=8).filter(lambda key: key not in ("configs", "dataset_info"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(keys, plain, max_size=5), st.text(max_size=40), st.sampled_from([None, True, False]))
def test_unknown_keys_and_text_stay_whatever_they_are(data: dict[str, Any], body: str, flow: bool | None) -> None:
    assume(data)
    stream = io.StringIO()
    yaml.safe_dump(data, stream, sort_keys=False, allow_unicode=True, default_flow_style=flow)
    text = f"---\n{stream.getvalue()}---\n{body}"
    card = read_card(text)
    assert card.data == data
    assert card.body == body
    made = put(card).render()
    again = read_card(made)
    assert again.body == body
    assert [(key, again.data[key]) for key in data] == list(data.items())
    assert [key for key in again.data if key in data] == list(data)
    assert again.render() == made == put(read_card(text)).render()
    assert put(again).render() == made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("---\na: [1\n---\n", r"README\.md: the front matter is not valid YAML: line \d+: .*; mend it"),
        ("---\na: !!python/object:os.system x\n---\n", "not valid YAML.*python/object"),
        ("---\na\tb: \x07\n---\n", "not valid YAML"),
        ("---\n- a\n---\n", "no mapping.*mend it"),
    ],
)
def test_a_broken_card_says_what_to_do(text: str, says: str) -> None:
    with pytest.raises(BadFile, match=says):
        read_card(text)


@pytest.mark.parametrize(
    "front",
    ["configs: 3", "configs: {a: b}", "configs:\n- data_files: x", "configs:\n- config_name: a\n  data_files: 3",
     "configs:\n- config_name: a\n  data_files:\n  - split: x",
     "configs:\n- config_name: a\n  data_files:\n  - {split: x, path: 3}",
     "dataset_info: 3", "dataset_info: [3]"],
)  # fmt: skip
def test_configs_that_are_none(front: str) -> None:
    with pytest.raises(BadFile, match=r"README\.md: `(configs|dataset_info)` of the front matter"):
        put(read_card(f"---\n{front}\n---\n"))


@pytest.mark.parametrize(
    ("config", "split"), [("default", "a-b"), ("default", ""), ("default", "a/b"), ("a/b", "x"), ("", "x")]
)
def test_names_that_are_none(config: str, split: str) -> None:
    with pytest.raises(UsageError, match="is no name for a"):
        check_names(config, split)
    with pytest.raises(UsageError):
        put(read_card(None), split, config=config)


def test_size_categories_only_where_there_are_some() -> None:
    assert "size_categories" not in put(read_card(None)).data
    card = read_card("---\nsize_categories:\n- n<1K\n---\n")
    assert put(card).data["size_categories"] == ["n<1K"]
    assert put(put(card, rows=999_999), "test", rows=1).data["size_categories"] == ["1M<n<10M"]


def test_a_file_that_overrides_the_card_is_named() -> None:
    with pytest.raises(UsageError, match=r"\.huggingface\.yaml.*delete it"):
        put(read_card(None), files=[".huggingface.yaml"])


# Loading -------------------------------------------------------------------------------------------------------------


def test_load_dataset_gives_what_the_card_says(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    rows = [{"id": 1, "label": 1, "image": {"bytes": b"x", "path": "x.png"}, "texts": ["a"]}]
    for name in ("v1/train-0.parquet", "v1/train-1.parquet", "v2/test-0.parquet"):
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=FEATURES.arrow_schema), repo / name)
    shard(repo / "more" / "a.parquet", {"id": [5], "more": ["z"]})
    shard(repo / "v1" / "stray.parquet", {"odd": [1]})
    card = put(read_card("---\nlicense: mit\n---\n"), rows=2, data_files="v1/train-*.parquet")
    card = put(card, "test", rows=1, data_files="v2/*.parquet")
    card = put(card, "all.of.it", config="more", features=OTHER, rows=1, data_files=["more/a.parquet"])
    write(repo, card)
    found = load_dataset(str(repo), "default")
    assert {name: len(one) for name, one in found.items()} == {"train": 2, "test": 1}
    assert found["train"].features == FEATURES
    assert found["train"].cast_column("image", Image(decode=False))[1] == rows[0]
    more = load_dataset(str(repo), "more")
    assert (list(more), more["all.of.it"].features, more["all.of.it"][0]) == (
        ["all.of.it"],
        OTHER,
        {"id": 5, "more": "z"},
    )
    assert datasets.get_dataset_config_names(str(repo)) == ["default", "more"]


def test_types_that_load_by_the_card_alone(tmp_path: Path) -> None:
    """datasets 5.2 refuses these columns by themselves."""
    columns = {
        "money": pa.array([None, None], pa.decimal32(5, 2)),
        "key": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"] * 2, pa.binary(16))),
        "image": pa.array(
            [{"bytes": b"x", "path": "p"}] * 2,
            pa.struct([pa.field("bytes", pa.binary(), nullable=False), pa.field("path", pa.string())]),
        ),
    }
    table = pa.table(columns)
    features = features_of(table.schema, known=Features(image=Image(decode=False)).to_dict())
    table = table.replace_schema_metadata({b"huggingface": huggingface_metadata(features)})
    repo = tmp_path / "repo"
    (repo / "data").mkdir(parents=True)
    pq.write_table(table, repo / "data" / "train-0.parquet")
    write(repo, put(read_card(None), features=Features.from_dict(features), rows=2))
    found = load_dataset(str(repo), split="train")
    assert found[1] == {"money": None, "key": b"0123456789abcdef", "image": {"bytes": b"x", "path": "p"}}
    assert found.features == Features.from_dict(features)


@pytest.mark.parametrize("name", ["data/train-00000-of-00001.parquet", "train.parquet", "x/y.parquet"])
def test_under_a_pinned_card_nothing_is_visible(name: str, tmp_path: Path) -> None:
    """So that the commits before the last one of a new repository show nothing."""
    repo = tmp_path / "repo"
    shard(repo / name, {"id": [1], "more": ["x"]})
    assert len(load_dataset(str(repo), split="train")) == 1  # without a card it is found
    card = pinned(read_card("---\nlicense: mit\n---\n# Title\n"))
    write(repo, card)
    for streaming in (False, True):
        for config in (None, "default", "other"):
            with pytest.raises((DataFilesNotFoundError, ValueError)):
                load_dataset(str(repo), config, streaming=streaming)
    assert visible_files(card, [name]) == named_files(card, [name]) == set()
    assert not card.has_configs
    assert pinned(card, [name]) == card
    done = put(card, features=OTHER, rows=1, data_files=name, files=[name])
    assert done == put(read_card("---\nlicense: mit\n---\n# Title\n"), features=OTHER, rows=1, data_files=name)
    write(repo, done)
    assert load_dataset(str(repo))["train"][0] == {"id": 1, "more": "x"}


def test_on_a_hub_nothing_is_visible_before_the_last_commit(at_hub: Desk) -> None:
    """The same through HTTP: a pinned card with a first shard, then the card of the split with the second."""
    api = HfApi(endpoint=at_hub.hub.url, token="hf_writer")
    api.create_repo(at_hub.repo, repo_type="dataset")

    def commit(files: dict[str, bytes]) -> None:
        adds = [CommitOperationAdd(path, io.BytesIO(data)) for path, data in files.items()]
        api.create_commit(at_hub.repo, adds, commit_message="x", repo_type="dataset")

    out = io.BytesIO()
    pq.write_table(pa.table({"id": [1], "more": ["x"]}), out)
    card = pinned(read_card(None))
    commit({"data/train-1/0.parquet": out.getvalue(), "README.md": card.render().encode()})
    for streaming in (False, True):
        with pytest.raises(DataFilesNotFoundError):
            load_dataset(at_hub.repo, streaming=streaming)
    card = put(card, features=OTHER, rows=2, data_files="data/train-1/*.parquet")
    commit({"data/train-1/1.parquet": out.getvalue(), "README.md": card.render().encode()})
    assert [row["id"] for row in load_dataset(at_hub.repo, split="train", streaming=True)] == [1, 1]
    found = load_dataset(at_hub.repo)
    assert (list(found), len(found["train"]), found["train"].features) == (["train"], 2, OTHER)


def test_what_an_older_push_to_hub_left_stays_visible(tmp_path: Path) -> None:
    """No card, shards under data/: other splits stay, before the last commit and after it."""
    repo = tmp_path / "repo"
    files = ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001-abc.parquet"]
    for name in files:
        shard(repo / name, {"id": [1], "more": ["x"]})
    assert {split: len(one) for split, one in load_dataset(str(repo)).items()} == {"train": 1, "test": 1}
    shard(repo / "data/new/a.parquet", {"id": [2, 3], "more": ["y", "z"]})
    during = pinned(read_card(None), files)
    write(repo, during)
    assert {split: len(one) for split, one in load_dataset(str(repo)).items()} == {"train": 1, "test": 1}
    assert named_files(during, [*files, "data/new/a.parquet"]) == set(files)
    assert owned_files(read_card(None), files, config_name="default", split="train") == {files[0]}
    after = put(read_card(None), features=OTHER, rows=2, data_files="data/new/*.parquet", files=files)
    (repo / files[0]).unlink()
    write(repo, after)
    found = load_dataset(str(repo))
    assert {split: len(one) for split, one in found.items()} == {"train": 2, "test": 1}
    assert "splits" not in after.data["dataset_info"]  # of the old split nobody knows the size
    whole = put(after, "test", features=OTHER, rows=1, data_files="data/test-*")
    assert "splits" not in whole.data["dataset_info"]
    write(repo, put(whole, features=OTHER, rows=2, data_files="data/new/*.parquet"))
    assert len(load_dataset(str(repo))["test"]) == 1


def test_loose_files_are_named_one_by_one(tmp_path: Path) -> None:
    files = ["train.parquet", "deep/test_1.parquet", "deep/test_2.parquet", "LICENSE.txt", "NOTES.md", ".gitattributes"]
    after = put(read_card(None), data_files="data/new/*.parquet", files=files)
    assert referenced_patterns(after)["default"] == {
        "train": ["data/new/*.parquet"],
        "test": ["deep/test_1.parquet", "deep/test_2.parquet"],
    }
    assert owned_files(read_card(None), files, config_name="default", split="train") == {"train.parquet"}
    many = [f"{at}.parquet" for at in range(1_000)]
    assert owned_files(read_card(None), many, config_name="default", split="train") == set(many)
    with pytest.raises(UsageError, match=r"many files.*name them under `configs`"):
        pinned(read_card(None), many)
    assert pinned(read_card(None), ["LICENSE.txt", "README.md", ".gitattributes", "LICENSE"]) == pinned(read_card(None))


def test_other_formats_beside_parquet_are_refused(tmp_path: Path) -> None:
    """load_dataset takes one reader for all configs: the one of the first."""
    repo = tmp_path / "repo"
    shard(repo / "data/train-0.parquet", {"id": [1], "more": ["x"]})
    (repo / "x.csv").write_text("a\n1\n")
    card = read_card("---\nconfigs:\n- config_name: a\n  data_files: x.csv\n---\n")
    write(repo, put(card, features=OTHER))
    with pytest.raises(Exception, match="error"):
        load_dataset(str(repo), "default")
    with pytest.raises(UsageError, match=r"x\.csv: split 'train' of config 'a' is no Parquet.*another repository"):
        put(card, features=OTHER, files=["x.csv"])
    replaced = put(read_card(None), features=OTHER, files=["x.csv"])  # the split it replaces is the csv
    assert named_files(replaced, ["x.csv", "data/train-0.parquet"]) == {"data/train-0.parquet"}


# Patterns ------------------------------------------------------------------------------------------------------------

TREE = [
    "README.md",
    ".gitattributes",
    ".penstock/default/train.json",
    "config.json",
    "LICENSE",
    "top.csv",
    "data/train-00000-of-00002.parquet",
    "data/train-00001-of-00002.parquet",
    "data/test-00000-of-00001.parquet",
    "data/deep/train-0.parquet",
    "data/deep/er/dev.parquet",
    "data/.hidden.parquet",
    "data/__special__/a.parquet",
    "odd [1]/a.parquet",
    "odd [1]/b{c}.parquet",
    "été/ü.parquet",
]
PATTERNS = [
    *("**", "*", "data/*", "data/**", "data/train-*", "./data/train-*", "data/**/*.parquet", "**/*.parquet", "*.csv"),
    *("data/train-0000?-of-*", "data/[td]*", "data/[!t]*", "data/[a-s]*/*", "data/train-[0-9][0-9]*", ".penstock/**"),
    *(".*", "**/.*", "data/.*", "*/*", "*/*/*", "data", "data/", "data//train-*", "__special__/*", "data/__*/*"),
    *("data/__special__/a.parquet", "README.md", "config.json", "config.*", "odd [[]1]/*", "odd [1]/*", "été/*"),
    *("**.parquet", "data/**.parquet", "odd*/b{c}.parquet", "nothing/*", "data/deep/**/dev.parquet", "data/de*/**"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    for name in TREE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_names_what_datasets_resolves(pattern: str, tree: Path) -> None:
    try:
        theirs = {str(Path(path).relative_to(tree)) for path in resolve_pattern(pattern, str(tree))}
    except (FileNotFoundError, ValueError):
        theirs = set()
    assert set(matching(pattern, TREE)) == theirs


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("ab-]^*?/.\\&|0[", min_size=1, max_size=9), st.lists(st.text("ab-]^/.\\&0[", min_size=1, max_size=7)))
@example("[!a]", ["a", "b", "!"])
@example("[]a]", ["a", "]"])
@example("[!]a]b", ["xb", "]b"])
def test_a_pattern_is_translated_as_fsspec_does(pattern: str, paths: list[str]) -> None:
    pattern = "/".join(part for part in pattern.split("/") if part)
    try:
        theirs = re.compile(glob_translate(pattern)) if pattern else None
    except ValueError:
        theirs = None
    ours = _regex(pattern) if pattern else None
    for path in [*paths, pattern]:
        assert bool(ours and ours.match(path)) == bool(theirs and theirs.match(path))


@pytest.mark.parametrize(
    "files",
    [
        ["data/train-00000-of-00001.parquet", "data/zoo-00000-of-00001.csv", "data/test-00000-of-00001-ab.gz", "x.csv"],
        ["train.csv", "my_test.csv", "other.csv"],
        ["a/train/x.csv", "a/x.csv"],
        ["a/training-1/x.csv", "b/dev/y.csv"],
        ["x.csv", "y/z.parquet"],
        ["logs/one.eval", "train.csv"],
        ["task/task.toml", "train.csv"],
        ["validation_0.parquet", "evaluation.parquet"],
        [".hidden/train.csv"],
        ["README.md"],
        [],
    ],
)  # fmt: skip
def test_what_is_found_without_a_card(files: list[str], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    try:
        theirs = {str(split): some for split, some in get_data_patterns(str(tmp_path)).items()}
    except datasets.data_files.EmptyDatasetError:
        theirs = {}
    assert discovered(files) == theirs
    assert visible_files(read_card(None), files) == {
        str(Path(path).relative_to(tmp_path))
        for some in theirs.values()
        for pattern in some
        for path in (resolve_pattern(pattern, str(tmp_path)) if matching(pattern, files) else [])
    }


def test_files_of_splits_and_who_owns_them() -> None:
    stated = {
        "configs": [
            {
                "config_name": "a",
                "data_files": [
                    {"split": "train", "path": ["data/train-*", "data/t*"]},
                    {"split": "dev", "path": "data/deep/**"},
                ],
            },
            {"config_name": "b", "data_files": ["data/test-*", "https://example.org/x.parquet", "*.csv"]},
            {"config_name": "c", "data_dir": "data/deep"},
        ]
    }  # fmt: skip
    card = read_card(f"---\n{yaml.safe_dump(stated)}---\n")
    train = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    found = split_files(card, TREE)
    assert found["a"] == {
        "train": [*train, "data/test-00000-of-00001.parquet"],
        "dev": ["data/deep/train-0.parquet", "data/deep/er/dev.parquet"],
    }
    assert found["b"] == {"train": ["data/test-00000-of-00001.parquet", "top.csv"]}
    assert found["c"] == {"train": ["data/deep/train-0.parquet"], "validation": ["data/deep/er/dev.parquet"]}
    assert owned_files(card, TREE, config_name="a", split="train") == set(train)
    assert owned_files(card, TREE, config_name="b", split="train") == set()
    assert owned_files(card, TREE, config_name="no", split="train") == set()
    assert named_files(card, TREE, config_name="b") == {"data/test-00000-of-00001.parquet", "top.csv"}
    assert named_files(card, TREE, config_name="a", split="dev") == {
        "data/deep/train-0.parquet",
        "data/deep/er/dev.parquet",
    }
    assert visible_files(card, TREE) == named_files(card, TREE)


def test_features_in_the_card_are_the_ones_in_the_files(tmp_path: Path) -> None:
    """One statement in two places: the README's YAML and the metadata of a shard."""
    card = put(read_card(None))
    stated = yaml.safe_load(card.render().split("---")[1])["dataset_info"]
    stored = json.loads(huggingface_metadata(FEATURES.to_dict()))["info"]["features"]
    assert DatasetInfo._from_yaml_dict(stated).features == Features.from_dict(stored) == FEATURES
