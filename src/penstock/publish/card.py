"""The card: README.md of a dataset repository, whose front matter says which files are which split.

What `load_dataset` gives is what the card names. So a card is changed for one split at a time, as `push_to_hub` of
datasets 5.2 shapes it, and all else in it stays as its author wrote it: other splits, unknown keys, comments, the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from penstock.errors import BadFile, SchemaClash, UsageError
from penstock.publish.features import Feature, features_from_yaml, understood, yaml_features
from penstock.publish.patterns import discovered, is_url, matching

NAME = "README.md"
DEFAULT = "default"
# Matches no file, so `load_dataset` of a card that names only this fails with "No (supported) data files found".
NOTHING_YET = "no-data-yet/*.parquet"
# Files that lie loose in a repository are named one by one once a card names files at all.
MOST_LOOSE = 200

Config = dict[str, Any]

# As huggingface_hub and the Hub find the front matter.
_FRONT = re.compile(r"^(\s*---(?:\r\n|\r|\n))([\S\s]*?)((?:\r\n|\r|\n)---[ \t]*(\r\n|\n|$))")
_SPLIT = re.compile(r"\w+(\.\w+)*")
_NOT_IN_CONFIG = frozenset(r'<>:/\|?*"')
_OVERRIDES = ".huggingface.yaml"
_NEVER = object()
_SIZES = (
    *((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M")),
    *((10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"), (10**11, "10B<n<100B")),
    *((10**12, "100B<n<1T"),),
)


@dataclass(frozen=True)
class Card:
    """A README: its front matter and its text. `written` are keys of the front matter as their author wrote them."""

    data: Mapping[str, Any] = field(default_factory=dict)
    body: str = ""
    newline: str = "\n"
    written: Mapping[str, tuple[Any, str]] = field(default_factory=dict, compare=False, repr=False)

    def render(self) -> str:
        """The whole README. Keys that were not changed keep their comments and quotes."""
        if not self.data:
            return self.body
        front = []
        for key, value in self.data.items():
            before, text = self.written.get(key, (_NEVER, ""))
            front.append(text if before is value else _dumped({key: value}, self.newline))
        return f"---{self.newline}{''.join(front)}---{self.newline}{self.body}"

    @property
    def has_configs(self) -> bool:
        """Whether it names files. Where it does not, `load_dataset` finds them by their names."""
        return bool(_configs(self))

    def with_data(self, **changed: Any) -> Card:
        return replace(self, data={**self.data, **changed})


def read_card(text: str | None) -> Card:
    """A card from a README's text, line ends as they are stored; None where there is no README."""
    text = (text or "").removeprefix("\ufeff")
    newline = "\r\n" if text.count("\r\n") * 2 > text.count("\n") else "\n"
    found = _FRONT.search(text)
    if found is None:
        return Card(body=text, newline=newline)
    block, body = found[2], text[found.end() :]
    mend = "mend it on the Hub (or remove the README) and run the same command again"
    try:
        data = yaml.safe_load(block)
        data = {} if data is None else data
        if not isinstance(data, dict):
            raise BadFile("the front matter is no mapping of keys to values", where=NAME, do=mend)
        written = _written(block, data, newline)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 2}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise BadFile(f"the front matter is not valid YAML: {line}{problem}", where=NAME, do=mend) from None
    return Card(data, body, newline, written)


def with_split(
    card: Card,
    *,
    config_name: str,
    split: str,
    data_files: str | Sequence[str],
    features: Mapping[str, Feature],
    num_examples: int,
    num_bytes: int,
    download_size: int,
    default: bool | None = None,
    deleted_size: int = 0,
    files: Sequence[str] = (),
    together: Collection[str] = (),
) -> Card:
    """The card once a split is published: where its files are, its features and sizes.

    `deleted_size` is what the files weigh that it replaces, `files` are those of the repository as it is now: where no
    card names them yet, the ones that `load_dataset` found by their names are named, so that they stay visible.
    `together` are splits that the same push replaces: what their features were before does not matter.

    As `push_to_hub` it refuses a split whose features are not those of the other splits of its config, and a second
    default config. Other than `push_to_hub`, it takes over the new features when the config's only split is replaced
    (there, stale ones stay and loading fails), keeps a config's other settings, `default` among them, keeps splits that
    an older `push_to_hub` left without a card, and those of a card without sizes (there, loading fails). It refuses a
    repository whose other configs are no Parquet: `load_dataset` reads all configs with the reader of the first.
    """
    check_names(config_name, split)
    if _OVERRIDES in files:
        raise UsageError(
            f"the repository has a {_OVERRIDES}, whose configs replace those of the README",
            where=_OVERRIDES,
            do="move what it says into the README's front matter and delete it",
        )
    configs = _settled(card, files)
    config = configs.get(config_name, {})
    # A config that is new has no splits yet, whatever lies there for the others.
    known = _patterns(config, files) if config_name in configs else {}
    patterns = {**known, split: [data_files] if isinstance(data_files, str) else list(data_files)}
    config = {key: value for key, value in config.items() if key != "data_dir"}
    config["data_files"] = [
        {"split": name, "path": some[0] if len(some) == 1 else some} for name, some in patterns.items()
    ]
    if "features" in config:
        config["features"] = yaml_features(features)
    configs[config_name] = config
    _set_default(configs, config_name, default)
    _only_parquet(configs, files, beside=(config_name, split))

    infos = _infos(card)
    infos[config_name] = _info(
        infos.get(config_name, {}),
        {"name": split, "num_bytes": num_bytes, "num_examples": num_examples},
        features,
        config_name=config_name,
        together=together,
        named=patterns,
        grown=download_size - deleted_size,
        least=download_size,
    )
    made = card.with_data(dataset_info=_dataset_info(infos), configs=_as_list(configs))
    return _with_size_category(made, infos)


def pinned(card: Card, files: Sequence[str] = ()) -> Card:
    """A card under which files may be added that nobody sees: they are not found by their names any more.

    Of `files`, those of the repository as it is now, the ones found so far stay named. Without any, `load_dataset`
    says that it found no data files, until `with_split` puts a split in the place of this.
    """
    if card.has_configs:
        return card
    configs = _settled(card, files) or {DEFAULT: {"data_files": [{"split": "train", "path": NOTHING_YET}]}}
    return card.with_data(configs=_as_list(configs))


def check_names(config_name: str, split: str) -> None:
    """Refuse names that `load_dataset` would not take."""
    if not _SPLIT.fullmatch(split):
        raise UsageError(f"split {split!r} is no name for a split", do="use letters, digits, _ and dots between them")
    if not config_name or _NOT_IN_CONFIG & set(config_name):
        raise UsageError(f"config {config_name!r} is no name for a config", do='use none of < > : / \\ | ? * "')


# What a card names ---------------------------------------------------------------------------------------------------


def referenced_patterns(card: Card, files: Sequence[str] = ()) -> dict[str, dict[str, list[str]]]:
    """The patterns of every split of every config, from the repository's root. Of a config without data_files they are
    those that `load_dataset` guesses from `files`."""
    return {name: _patterns(config, files) for name, config in _configs(card).items()}


def split_files(card: Card, files: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """The files of every split of every config that a card names, each once."""
    return {
        name: {split: _named(patterns, files) for split, patterns in splits.items()}
        for name, splits in referenced_patterns(card, files).items()
    }


def named_files(
    card: Card, files: Sequence[str], *, config_name: str | None = None, split: str | None = None
) -> set[str]:
    """Those of a repository's files that the configs of its card name: all of them, or those of one config or split."""
    return {
        path
        for name, splits in split_files(card, files).items()
        for one, some in splits.items()
        for path in some
        if config_name in (None, name) and split in (None, one)
    }


def visible_files(card: Card, files: Sequence[str]) -> set[str]:
    """Those of a repository's files that `load_dataset` can see: named by configs or, where there are none, found."""
    if card.data.get("configs"):
        return named_files(card, files)
    return {path for patterns in discovered(files).values() for path in _named(patterns, files)}


def owned_files(card: Card, files: Sequence[str], *, config_name: str, split: str) -> set[str]:
    """The Parquet files that one split has and no other: those to delete when it is replaced. Files of other formats
    stay where they are; a pattern such as `**` names licences and pictures too."""
    splits = split_files(card, files)
    if not card.data.get("configs"):
        splits = {DEFAULT: {found: _named(patterns, files) for found, patterns in discovered(files).items()}}
    own = {path for path in splits.get(config_name, {}).get(split, []) if path.endswith(".parquet")}
    for name, others in splits.items():
        for other, some in others.items():
            if (name, other) != (config_name, split):
                own.difference_update(some)
    return own


def _named(patterns: Iterable[str], files: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(path for pattern in patterns if not is_url(pattern) for path in matching(pattern, files)))


def _patterns(config: Config, files: Sequence[str]) -> dict[str, list[str]]:
    """Patterns by split of one config, from the root."""
    under = "".join(f"{part}/" for part in str(config.get("data_dir") or "").split("/") if part not in ("", "."))
    stated = config.get("data_files")
    if stated is None:
        found = discovered([path.removeprefix(under) for path in files if path.startswith(under)])
    elif isinstance(stated, str):
        found = {"train": [stated]}
    elif any(isinstance(one, dict) for one in stated):
        found = {str(one["split"]): [one["path"]] if isinstance(one["path"], str) else one["path"] for one in stated}
    else:
        found = {"train": list(stated)} if stated else {}
    return {split: [one if is_url(one) else under + one for one in some] for split, some in found.items()}


# Configs -------------------------------------------------------------------------------------------------------------


def _configs(card: Card) -> dict[str, Config]:
    """The configs of a card by name, without the one that stands for nothing yet."""
    stated = card.data.get("configs") or []
    found: dict[str, Config] = {}
    for one in stated if isinstance(stated, list) else [stated]:
        if not isinstance(one, dict) or not isinstance(one.get("config_name"), str) or not _has_files(one):
            raise BadFile(
                f"`configs` of the front matter has an entry that is no config: {one!r}"[:300],
                where=NAME,
                do="each needs a `config_name`, and `data_files` that are patterns, or a list of `split` and `path`",
            )
        found[one["config_name"]] = {key: value for key, value in one.items() if key != "config_name"}
    return {name: config for name, config in found.items() if not _is_nothing(config)}


def _has_files(config: Config) -> bool:
    stated = config.get("data_files")
    if stated is None or isinstance(stated, str):
        return True
    if not isinstance(stated, list):
        return False
    if all(isinstance(one, str) for one in stated):
        return True
    return all(
        isinstance(one, dict)
        and isinstance(one.get("split"), str)
        and (isinstance(path := one.get("path"), str) or (isinstance(path, list) and all(map(_is_text, path))))
        for one in stated
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_nothing(config: Config) -> bool:
    return list(_patterns(config, ()).values()) == [[NOTHING_YET]]


def _settled(card: Card, files: Sequence[str]) -> dict[str, Config]:
    """The configs of a card; where it has none, one that names what `load_dataset` found by names."""
    configs = _configs(card)
    if configs or card.data.get("configs"):  # or nothing yet: what lies there was never visible
        return configs
    splits: dict[str, list[str]] = {}
    for split, patterns in discovered(files).items():
        if patterns[0].startswith("data/"):  # as an older push_to_hub left them, and as the newer ones name them
            splits[split] = [f"data/{split}-*"]
        elif loose := [path for path in _named(patterns, files) if not _is_document(path)]:
            splits[split] = loose
    if sum(map(len, splits.values())) > MOST_LOOSE:
        raise UsageError(
            "the repository holds many files that load_dataset finds by their names, and its README names none",
            where=NAME,
            do="name them under `configs` in its front matter first, or publish to another repository",
        )
    named = [{"split": split, "path": some[0] if len(some) == 1 else some} for split, some in splits.items()]
    return {DEFAULT: {"data_files": named}} if named else {}


def _is_document(path: str) -> bool:
    """A licence, a list of changes, a citation: beside the data, although `load_dataset` would try to read it."""
    stem, dot, ending = path.rpartition("/")[2].partition(".")
    return not dot or stem.isupper() or ending.lower() in ("md", "toml", "cff", "bib", "rst", "py", "ipynb")


def _set_default(configs: dict[str, Config], name: str, default: bool | None) -> None:
    marked = [other for other, config in configs.items() if other != name and config.get("default")]
    if name == DEFAULT and marked:
        raise UsageError(
            f"config {marked[0]!r} is the default, and one named 'default' would be a second",
            where=NAME,
            do="publish under another config name, or take `default: true` away from that one",
        )
    if default is None or name == DEFAULT:
        return
    configs[name].pop("default", None)
    if not default:
        return
    if DEFAULT in configs:
        raise UsageError(
            f"config {name!r} cannot be the default: there is one named 'default'",
            where=NAME,
            do="rename that one first, or leave out `set_default`",
        )
    for other, config in configs.items():
        configs[other] = {key: value for key, value in config.items() if key != "default"}
    configs[name]["default"] = True


def _only_parquet(configs: Mapping[str, Config], files: Sequence[str], *, beside: tuple[str, str]) -> None:
    for name, config in configs.items():
        for split, patterns in _patterns(config, files).items():
            if (name, split) == beside:
                continue
            for path in _named(patterns, files):
                if not path.endswith(".parquet") and not _is_document(path):
                    raise UsageError(
                        f"split {split!r} of config {name!r} is no Parquet, and load_dataset reads all configs of a"
                        " repository with one reader",
                        where=path,
                        do="publish that split as Parquet too, take it out of the README, or use another repository",
                    )


def _as_list(configs: Mapping[str, Config]) -> list[Config]:
    return [{"config_name": name, **configs[name]} for name in sorted(configs)]


# dataset_info --------------------------------------------------------------------------------------------------------


def _infos(card: Card) -> dict[str, dict[str, Any]]:
    stated = card.data.get("dataset_info") or []
    entries = [stated] if isinstance(stated, dict) else stated
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise BadFile("`dataset_info` of the front matter is no mapping and no list", where=NAME, do="remove it")
    return {
        str(one.get("config_name", DEFAULT)): {key: value for key, value in one.items() if key != "config_name"}
        for one in entries
    }


def _info(
    before: Mapping[str, Any],
    split: dict[str, Any],
    features: Mapping[str, Feature],
    *,
    config_name: str,
    together: Collection[str],
    named: Collection[str],
    grown: int,
    least: int,
) -> dict[str, Any]:
    """One config's sizes and features with a split added or replaced. The split goes last, as push_to_hub has it.

    load_dataset refuses a config whose `splits` are not those of its data_files: where one of them was never counted,
    the numbers are left out, which it takes.
    """
    stated = [one for one in before.get("splits") or [] if isinstance(one, dict) and one.get("name") in named]
    others = [one for one in stated if one["name"] != split["name"]]
    if staying := [one["name"] for one in others if one["name"] not in together]:
        _same_features(before.get("features"), features, config_name, staying)
    made: dict[str, Any] = {"features": yaml_features(features)}
    if len(others) + 1 == len(named):
        made["splits"] = [*others, split]
        made["download_size"] = max(_count(before.get("download_size")) + grown, least) if others else least
        made["dataset_size"] = sum(_count(one.get("num_bytes")) for one in made["splits"])
    return {**made, **{key: value for key, value in before.items() if key not in _OWN_KEYS}}


_OWN_KEYS = ("features", "splits", "download_size", "dataset_size")


def _same_features(stated: object, features: Mapping[str, Feature], config_name: str, others: Sequence[str]) -> None:
    there = features_from_yaml(stated) or {}
    here = {name: understood(feature) for name, feature in features.items()}
    if there == here:
        return
    odd = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    raise SchemaClash(
        f"the columns of the new split are not those of the other splits of config {config_name!r}"
        f" ({', '.join(others)}): {', '.join(odd[:5])}{' and more' if len(odd) > 5 else ''} differ",
        where=NAME,
        do="publish it under another config_name, or make the columns the same",
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _dataset_info(infos: Mapping[str, dict[str, Any]]) -> dict[str, Any] | list[dict[str, Any]]:
    if len(infos) == 1:
        name, info = next(iter(infos.items()))
        return info if name == DEFAULT else {"config_name": name, **info}
    return [{"config_name": name, **infos[name]} for name in sorted(infos)]


def _with_size_category(card: Card, infos: Mapping[str, dict[str, Any]]) -> Card:
    """push_to_hub sets none; one that is there is kept true."""
    stated = card.data.get("size_categories")
    if not stated:
        return card
    rows = sum(_count(split.get("num_examples")) for info in infos.values() for split in info.get("splits") or [])
    right = next((name for most, name in _SIZES if rows < most), "n>1T")
    if stated in (right, [right]):
        return card
    return card.with_data(size_categories=[right])


# YAML ----------------------------------------------------------------------------------------------------------------


def _dumped(data: dict[str, Any], newline: str) -> str:
    """As huggingface_hub dumps a card, without tags of Python."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, line_break=newline)


def _written(block: str, data: Mapping[str, Any], newline: str) -> dict[str, tuple[Any, str]]:
    """Keys of a plain block of YAML as they were written, the comments above them included. None where keys lean on
    each other (anchors) or do not start a line, and none whose meaning hangs on what comes after it."""
    for event in yaml.parse(block, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or (isinstance(event, _DOCUMENT) and event.explicit):
            return {}
    root = yaml.compose(block, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or root.flow_style or len(root.value) != len(data):
        return {}
    starts = []
    for key, _ in root.value:
        if key.start_mark.column != 0:
            return {}
        starts.append(_with_comments(block, key.start_mark.index))
    starts[:1] = [0]
    found = {}
    for (name, value), start, end in zip(data.items(), starts, [*starts[1:], len(block)], strict=True):
        text = block[start:end] if block.endswith("\n", start, end) else block[start:end] + newline
        with suppress(yaml.YAMLError):
            if yaml.safe_load(text) == {name: value}:
                found[name] = (value, text)
    return found


_DOCUMENT = (yaml.DocumentStartEvent, yaml.DocumentEndEvent)


def _with_comments(block: str, start: int) -> int:
    """Where the comments begin that stand right above a key."""
    while start > 0:
        above = block.rfind("\n", 0, start - 1) + 1
        if not block.startswith("#", above):
            break
        start = above
    return start
