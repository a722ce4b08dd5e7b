"""The texts that go with scans, read as they are: exact bytes as UTF-8, and sidecars merged by inheritance."""

from __future__ import annotations

import json
from functools import lru_cache

from penstock.errors import BadFile
from penstock.media.bids.folders import File
from penstock.media.bids.scans import Scan

LARGEST_TEXT = 1 << 20


def read_texts(scan: Scan, base: str, moved: set[str]) -> dict[str, str]:
    """A scan's texts by member. One that is no UTF-8, or long, becomes a file among the scan's others; `moved` keeps
    which have, since several scans may share it. Those from folders above `base` have their place there."""
    found: dict[str, str] = {}
    for member, file in list(scan.texts.items()):
        text = _read(file)
        if text is not None:
            found[member] = text
            continue
        del scan.texts[member]
        if file.path.startswith(base + "/") and file.path not in moved:
            moved.add(file.path)
            scan.others.append(file)
    return found


def merged(scan: Scan, texts: dict[str, str]) -> str | None:
    """The scan's metadata as BIDS means them, the nearest file winning; None where it inherits nothing."""
    levels = [fields for file in scan.inherited if (fields := _fields(_read(file)))]
    if not levels:
        return None
    whole: dict[str, object] = {}
    for fields in (*levels, _fields(texts.get("sidecar")) or {}):
        whole.update(fields)
    return json.dumps(whole)


def _fields(text: str | None) -> dict[str, object] | None:
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None  # `check` names it; the text itself is kept as it is
    return found if isinstance(found, dict) else None


def _read(file: File) -> str | None:
    return _text(file.file, file.modified) if file.size <= LARGEST_TEXT else None


@lru_cache(64)  # those at the root are every scan's
def _text(file: str, modified: int) -> str | None:
    try:
        with open(file, "rb") as f:
            return f.read().decode()
    except UnicodeDecodeError:
        return None
    except FileNotFoundError:
        return ""  # not fetched: known, and said before anything is made of it
    except OSError as error:
        raise BadFile(f"cannot be read ({error.strerror})", where=file) from error
