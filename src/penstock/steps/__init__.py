"""Operations on rows: one file per step. A new step is one file and one line in this table."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.steps.base import Step

# The word a user types, and the class in the module of that name.
STEPS: dict[str, str] = {
    "drop": "Drop",
    "filter": "Filter",
    "limit": "Limit",
    "map": "Map",
    "rename": "Rename",
    "sample": "Sample",
    "select": "Select",
}


def make_step(name: str, *args: Any, **kwargs: Any) -> Step:
    """A step by its name, with the arguments of its `make`."""
    if name not in STEPS:
        raise UsageError(f"there is no step {name!r}; one of {', '.join(STEPS)}")
    module = import_module(f"penstock.steps.{name}")
    return cast("Step", getattr(module, STEPS[name]).make(*args, **kwargs))
