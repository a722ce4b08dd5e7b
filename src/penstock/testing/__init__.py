"""Loopback servers to rehearse and test publishing: a Hugging Face Hub (`hub`) and an S3-style store (`s3`).

Real HTTP on 127.0.0.1 with persistence and fault injection, on the standard library alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.testing.faults import Faults as Faults
    from penstock.testing.faults import Rule as Rule
    from penstock.testing.hub import LoopbackHub as LoopbackHub
    from penstock.testing.s3 import LoopbackS3 as LoopbackS3

# Looked up when first used, so that `python -m penstock.testing.hub` runs the module it names and not a second copy.
_HOMES = {"Faults": "faults", "LoopbackHub": "hub", "LoopbackS3": "s3", "Rule": "faults"}

__all__ = ["Faults", "LoopbackHub", "LoopbackS3", "Rule"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.testing' has no attribute {name!r}")
    return getattr(import_module(f"penstock.testing.{_HOMES[name]}"), name)
