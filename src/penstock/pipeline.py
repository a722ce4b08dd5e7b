"""Pipeline files: YAML with the same words as the Python calls."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.dataset import Dataset, read
from penstock.errors import NotFound, UsageError
from penstock.steps import STEPS

_RUNNING = ("memory", "disk", "workers", "scratch")
_WORDS = ("read", "steps", "write", *_RUNNING)
_READ = ("from", "format", "columns", "infer", "on_error")
_WRITE = ("to", "max_shard_size", "format", "rewrite")


@dataclass(frozen=True)
class Pipeline:
    """What a file says: a dataset, where it goes, and how it is to run."""

    dataset: Dataset
    to: str
    write: dict[str, Any]
    run: dict[str, Any]


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
    for needed in ("read", "write"):
        if needed not in words:
            raise UsageError(f"has no `{needed}:`", where=str(path))
    dataset = _read(words["read"], str(path))
    steps = words.get("steps") or []
    if not isinstance(steps, list):
        raise UsageError("is a list, each entry `- word: what it takes`", where=f"{path} steps")
    for at, entry in enumerate(steps):
        dataset = _step(dataset, entry, f"{path} step {at + 1}", path.parent)
    write = words["write"] if isinstance(words["write"], dict) else {"to": words["write"]}
    _check_words(write, _WRITE, f"{path} write")
    if "to" not in write:
        raise UsageError("has no `to:`", where=f"{path} write")
    return Pipeline(
        dataset,
        to=str(write["to"]),
        write={name: value for name, value in write.items() if name != "to"},
        run={name: words[name] for name in _RUNNING if name in words},
    )


def _read(words: Any, where: str) -> Dataset:
    if not isinstance(words, dict):
        if not isinstance(words, str | list):
            raise UsageError(f"is a path, a list of paths or a mapping, not {words!r}", where=f"{where} read")
        return read(words)
    _check_words(words, _READ, f"{where} read")
    if "from" not in words:
        raise UsageError("has no `from:`", where=f"{where} read")
    return read(words["from"], **{name: value for name, value in words.items() if name != "from"})


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
