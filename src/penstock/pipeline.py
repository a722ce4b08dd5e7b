"""Pipeline files: YAML with the same words as the Python calls."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.dataset import Dataset
from penstock.errors import NotFound, UsageError
from penstock.steps import STEPS

_RUNNING = ("memory", "disk", "workers", "scratch")
# What each word takes: the keywords of the Python call of the same name, with `from` or `to` for its first argument.
_READERS = {
    "read": ("from", "format", "columns", "infer", "on_error"),
    "read_files": ("from", "media", "root"),
    "read_bids": ("from", "row", "sidecars", "derivatives", "include", "exclude"),
}
_WRITERS = {
    "write": ("to", "max_shard_size", "format", "rewrite"),
    "push": ("to", "split", "config_name", "set_default", "data_dir", "private", "revision", "create_pr",
             "commit_message", "commit_description", "max_shard_size", "num_shards"),
}  # fmt: skip
_WORDS = (*_READERS, "steps", *_WRITERS, *_RUNNING)


@dataclass(frozen=True)
class Pipeline:
    """What a file says: a dataset, where it goes, and how it is to run."""

    dataset: Dataset
    to: str
    write: dict[str, Any]
    run: dict[str, Any]
    pushes: bool = False


def load(path: Path) -> Pipeline:
    """Read a pipeline file. Relative paths in it are relative to where the command runs, as in a shell."""
    import yaml

    try:
        words = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise NotFound("there is no such pipeline file", where=str(path), do="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read ({error})", where=str(path)) from None
    except yaml.YAMLError as error:
        raise UsageError(f"is not YAML ({' '.join(str(error).split())})", where=str(path)) from None
    if not isinstance(words, dict):
        raise UsageError("holds no mapping; it starts with `read:`", where=str(path))
    _check_words(words, _WORDS, str(path))
    reader, writer = _one_of(words, _READERS, str(path)), _one_of(words, _WRITERS, str(path))
    dataset = _read(reader, words[reader], str(path))
    steps = words.get("steps") or []
    if not isinstance(steps, list):
        raise UsageError("is a list, each entry `- word: what it takes`", where=f"{path} steps")
    for at, entry in enumerate(steps):
        dataset = _step(dataset, entry, f"{path} step {at + 1}", path.parent)
    write = words[writer] if isinstance(words[writer], dict) else {"to": words[writer]}
    _check_words(write, _WRITERS[writer], f"{path} {writer}")
    if "to" not in write:
        raise UsageError("has no `to:`", where=f"{path} {writer}")
    return Pipeline(
        dataset,
        to=str(write["to"]),
        write={name: value for name, value in write.items() if name != "to"},
        run={name: words[name] for name in _RUNNING if name in words},
        pushes=writer == "push",
    )


def _one_of(words: Mapping[str, Any], known: Mapping[str, Any], where: str) -> str:
    """The one word of some that a file must have."""
    found = [word for word in known if word in words]
    if len(found) == 1:
        return found[0]
    choice = ", ".join(f"`{word}:`" for word in known)
    if not found:
        raise UsageError(f"has no `{next(iter(known))}:`", where=where, do=f"it needs one of {choice}")
    raise UsageError(f"has both `{found[0]}:` and `{found[1]}:`", where=where, do=f"it takes one of {choice}")


def _read(reader: str, words: Any, where: str) -> Dataset:
    import penstock

    call = getattr(penstock, reader)
    if not isinstance(words, dict):
        if not isinstance(words, str | list):
            raise UsageError(f"is a path, a list of paths or a mapping, not {words!r}", where=f"{where} {reader}")
        return call(words)  # type: ignore[no-any-return]
    _check_words(words, _READERS[reader], f"{where} {reader}")
    if "from" not in words:
        raise UsageError("has no `from:`", where=f"{where} {reader}")
    return call(words["from"], **{name: value for name, value in words.items() if name != "from"})  # type: ignore[no-any-return]


def _step(dataset: Dataset, entry: Any, where: str, folder: Path) -> Dataset:
    """One entry such as `- limit: 1000`, `- select: [id, text]` or `- map: {fn: "my_module:clean"}`."""
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, dict) or len(entry) != 1:
        raise UsageError("a step is one word and what it takes, such as `- limit: 1000`", where=where)
    ((name, words),) = entry.items()
    if name not in STEPS:
        raise UsageError(f"there is no step {name!r}; one of {', '.join(STEPS)}", where=where)
    method = getattr(dataset, name)
    try:
        if name in ("map", "filter"):
            words = {"fn": words} if isinstance(words, str) else dict(words)
            return method(_function(words.pop("fn", None), where, folder), **words)  # type: ignore[no-any-return]
        if name == "sample" and not isinstance(words, dict):
            return method(fraction=words)  # type: ignore[no-any-return]
        if name == "rename" or not isinstance(words, dict):
            return method(words)  # type: ignore[no-any-return]
        return method(**words)  # type: ignore[no-any-return]
    except TypeError as error:
        raise UsageError(f"{name}: {error}", where=where) from None
    except UsageError as error:
        raise UsageError(
            f"{error.where}: {error.what}" if error.where else error.what, where=where, do=error.do
        ) from None


def _function(name: Any, where: str, folder: Path) -> Any:
    """`my_module:clean`, with modules beside the pipeline file found too."""
    module, colon, attribute = str(name).partition(":")
    if not colon:
        raise UsageError(f'fn is "module:function", not {name!r}', where=where)
    for place in (str(folder.absolute()), str(Path.cwd())):
        if place not in sys.path:
            sys.path.insert(0, place)
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise UsageError(f"cannot import {module!r} ({error})", where=where, do="put it beside the file") from None
    except AttributeError:
        raise UsageError(f"module {module!r} has no {attribute!r}", where=where) from None
    except Exception as error:
        raise UsageError(f"importing {module!r} raised {type(error).__name__}: {error}", where=where) from error


def _check_words(words: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    from difflib import get_close_matches

    for word in words:
        if word not in known:
            near = get_close_matches(str(word), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known words: {', '.join(known)}"
            raise UsageError(f"does not know {word!r}", where=where, do=hint)
