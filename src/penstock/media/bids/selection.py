"""Which files of a tree are taken: `.bidsignore`, and the words and globs a user includes or excludes by."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import translate

from penstock.errors import UsageError
from penstock.media.bids.names import parse


class Ignore:
    """The patterns of a `.bidsignore`, which are those of a `.gitignore`; the last that matches decides.

    >>> ignore = Ignore("*_scratch.*\\nextra/\\n!keep_scratch.txt\\n")
    >>> ignore("sub-01/a_scratch.nii"), ignore("extra/deep/a.txt"), ignore("keep_scratch.txt")
    (True, True, False)
    """

    def __init__(self, text: str = "") -> None:
        self._rules = [rule for line in text.splitlines() if (rule := _rule(line)) is not None]

    def __call__(self, path: str) -> bool:
        ignored = False
        for pattern, keeps in self._rules:
            if ignored == keeps and pattern.match(path):
                ignored = not keeps
        return ignored


def _rule(line: str) -> tuple[re.Pattern[str], bool] | None:
    """A line's pattern, which matches a file by its own name or a folder above it, and whether it takes back."""
    text = re.sub(r"(?<!\\)\s+$", "", line)
    if not text or text.startswith("#"):
        return None
    keeps = text.startswith("!")
    text = text[1:] if keeps else text
    folder_only = text.endswith("/")
    text = text.rstrip("/")
    anchored = "/" in text
    text = text.lstrip("/")
    if not text:
        return None
    end = "/" if folder_only else "(?:/|$)"
    return re.compile(("" if anchored else "(?:.*/)?") + _glob(text) + end, re.DOTALL), keeps


def _glob(text: str) -> str:
    """A pattern where `*` stops at a slash and `**` does not."""
    out, at = "", 0
    while at < len(text):
        char = text[at]
        if text.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
        elif text.startswith("**", at):
            out, at = out + ".*", at + 2
        elif char == "*":
            out, at = out + "[^/]*", at + 1
        elif char == "?":
            out, at = out + "[^/]", at + 1
        elif char == "[" and (close := text.find("]", at + 2)) > 0:
            inside = text[at + 1 : close].replace("\\", "\\\\")
            out, at = out + "[" + ("^" + inside[1:] if inside[0] in "!^" else inside) + "]", close + 1
        elif char == "\\" and at + 1 < len(text):
            out, at = out + re.escape(text[at + 1]), at + 2
        else:
            out, at = out + re.escape(char), at + 1
    return out


@dataclass(frozen=True)
class Selection:
    """Words (a suffix, a datatype, a folder's or file's name) and globs (on the name, or with a slash on the path)."""

    words: frozenset[str]
    names: tuple[re.Pattern[str], ...]
    paths: tuple[re.Pattern[str], ...]

    def __call__(self, path: str, *, suffix: str = "") -> bool:
        """Whether a file is meant, by its path in the tree and, for a scan, its suffix."""
        parts = path.split("/")
        if self.words and (suffix.lower() in self.words or not self.words.isdisjoint(map(str.lower, parts))):
            return True
        return any(glob.match(parts[-1]) for glob in self.names) or any(glob.match(path) for glob in self.paths)


def selection(given: str | Iterable[str] | None, *, name: str) -> Selection | None:
    """What `include` or `exclude` means; None where it was not given."""
    if given is None:
        return None
    items = [given] if isinstance(given, str) else list(given)
    if not items or not all(isinstance(item, str) and item for item in items):
        raise UsageError(
            f'{name} is a word such as "bold", a glob such as "sub-01/*", or a list of them, not {given!r}'
        )
    globs = [item for item in items if any(char in item for char in "*?[/")]
    return Selection(
        words=frozenset(item.lower() for item in items if item not in globs),
        names=tuple(re.compile(translate(glob)) for glob in globs if "/" not in glob),
        paths=tuple(re.compile(translate(glob.lstrip("/"))) for glob in globs if "/" in glob),
    )


@dataclass(frozen=True)
class Keep:
    """What of a tree is taken. `include` chooses scans, whose companions come along; `exclude` leaves out any file."""

    include: Selection | None
    exclude: Selection | None

    def scan(self, path: str, suffix: str) -> bool:
        included = self.include is None or self.include(path, suffix=suffix)
        return included and (self.exclude is None or not self.exclude(path, suffix=suffix))

    def companion(self, path: str) -> bool:
        return self.exclude is None or not self.exclude(path, suffix=_suffix(path))

    def other(self, path: str) -> bool:
        """A file in a row that goes with no scan."""
        return self.scan(path, _suffix(path))


def _suffix(path: str) -> str:
    name = parse(path.rpartition("/")[2])
    return "" if name is None else name.suffix
