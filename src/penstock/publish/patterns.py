"""Which of a repository's files a pattern names, and which `load_dataset` finds where no card names any.

Both as datasets 5.2 resolves them: `*` stays within a folder, `**` does not, hidden files must be asked for. Without
touching a file system, so that a push knows before a commit what will be visible after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

# Never data, unless a pattern ends in the very name.
NEVER_DATA = frozenset(
    ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json")
)
_SHARDED = "data/*-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]*.*"
_SHARD_NAME = re.compile(r"(.+)-\d{5}-of-\d{5}.*")
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_APART = "-._ 0-9"


def matching(pattern: str, files: Iterable[str]) -> list[str]:
    """The files one pattern of a card names, in the order given.

    >>> matching("data/*", ["data/a.parquet", "data/deep/b.parquet", "data/.hidden.parquet"])
    ['data/a.parquet']
    """
    while pattern.startswith("./"):
        pattern = pattern[2:]
    regex = _regex(pattern)
    if regex is None:
        return []
    ignored = NEVER_DATA - {pattern.rpartition("/")[2]}
    hidden, special = _hidden(pattern), _special(pattern)
    return [
        path
        for path in files
        if regex.match(path)
        and path.rpartition("/")[2] not in ignored
        and _hidden(path) == hidden
        and _special(path) == special
    ]


def discovered(files: Sequence[str]) -> dict[str, list[str]]:
    """What `load_dataset` takes for splits where a card names none: patterns by split, from names and folders.

    >>> discovered(["data/train-00000-of-00001.parquet", "extra.csv"])
    {'train': ['data/train-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]*.*']}
    """
    if shards := matching(_SHARDED, files):
        splits = {found[1] for path in shards if (found := _SHARD_NAME.fullmatch(path.rpartition("/")[2]))}
        order = [*(split for split in _WORDS if split in splits), *sorted(splits - set(_WORDS))]
        return {split: [_SHARDED.replace("*", split, 1)] for split in order}
    for patterns in _guesses():
        if found_splits := {
            split: some for split, some in patterns.items() if any(matching(one, files) for one in some)
        }:
            return found_splits
    return {}


def is_url(pattern: str) -> bool:
    """Whether a pattern names files elsewhere."""
    return "://" in pattern or "::" in pattern


def _guesses() -> Iterator[dict[str, list[str]]]:
    yield {"logs": ["**/*.eval"]}
    yield {"test": ["**/task.toml", "**/instruction.md"]}
    in_folder = ("**/{}/**", f"**/{{}}[{_APART}]*/**", f"**/*[{_APART}]{{}}/**", f"**/*[{_APART}]{{}}[{_APART}]*/**")
    in_name = (f"**/{{}}[{_APART}]*", f"**/*[{_APART}]{{}}[{_APART}]*")
    for shapes in (in_folder, in_name):
        yield {split: [shape.format(word) for word in words for shape in shapes] for split, words in _WORDS.items()}
    yield {"train": ["**"]}


def _hidden(path: str) -> int:
    return sum(part.startswith(".") and set(part) != {"."} for part in path.split("/"))


def _special(path: str) -> int:
    return sum(part.startswith("__") for part in path.split("/")[:-1])


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str] | None:
    """As fsspec translates a glob; None for one that it refuses."""
    parts = pattern.split("/")
    made = []
    for at, part in enumerate(parts):
        last = at == len(parts) - 1
        if part == "**":
            made.append(".*" if last else "(?:.+/)?")
        elif "**" in part:
            return None
        elif part == "*":
            made.append("[^/]+" if last else "[^/]+/")
        else:
            made.append(_segment(part) + ("" if last else "/"))
    try:
        return re.compile(rf"(?s:{''.join(made)})\Z")
    except re.error:
        return None


def _segment(part: str) -> str:
    made, at = "", 0
    while at < len(part):
        letter, at = part[at], at + 1
        if letter == "[":
            # A bracket right after the opening one is a member of the set.
            end = part.find("]", at + 1 + (part[at : at + 1] == "!"))
            if end < 0:
                made += r"\["
            else:
                made, at = made + _set(part[at:end]), end + 1
        else:
            made += {"*": "[^/]*", "?": "[^/]"}.get(letter, re.escape(letter))
    return made


def _set(inside: str) -> str:
    """One [set] of a pattern; ranges that run backwards are empty."""
    negated, members = inside[:1] == "!", inside.removeprefix("!")
    made, at = "", 0
    while at < len(members):
        first = members[at]
        if at + 2 < len(members) and members[at + 1] == "-":
            final = members[at + 2]
            made += f"{re.escape(first)}-{re.escape(final)}" if first <= final else ""
            at += 3
        else:
            made += re.escape(first)
            at += 1
    if not made:
        return "." if negated else "(?!)"
    return f"[{'^' if negated else ''}{made}]"
