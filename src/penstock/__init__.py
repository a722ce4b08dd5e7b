"""Penstock: any dataset, any size, through the memory you give it."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if sys.platform not in ("linux", "darwin"):
    raise ImportError("Penstock runs on Linux, and on macOS with a softer guard; not on " + sys.platform)

if TYPE_CHECKING:
    from penstock import errors as errors
    from penstock.dataset import Dataset as Dataset
    from penstock.dataset import concat as concat
    from penstock.dataset import read as read
    from penstock.media.check import check as check
    from penstock.media.export import export as export
    from penstock.media.read import read_bids as read_bids
    from penstock.media.read import read_files as read_files
    from penstock.publish.api import push as push
    from penstock.publish.verify import verify as verify
    from penstock.receipt import Receipt as Receipt

__version__ = "0.1.0"

# Where each public name lives, looked up when first used: a splicing worker must never load Arrow.
_HOMES = {
    "Dataset": "dataset",
    "Receipt": "receipt",
    "check": "media.check",
    "concat": "dataset",
    "errors": "",
    "export": "media.export",
    "push": "publish.api",
    "read": "dataset",
    "read_bids": "media.read",
    "read_files": "media.read",
    "verify": "publish.verify",
}

__all__ = [
    "Dataset",
    "Receipt",
    "__version__",
    "check",
    "concat",
    "errors",
    "export",
    "push",
    "read",
    "read_bids",
    "read_files",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    home = _HOMES[name]
    return getattr(import_module(f"penstock.{home}"), name) if home else import_module(f"penstock.{name}")


def __dir__() -> list[str]:
    return __all__
