"""`participants.tsv` and `sessions.tsv`: rows by id, types told from the whole column, "n/a" is null."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from penstock.errors import BadFile, BadRow

NOTHING = ("n/a", "N/A", "")
# What a number written again would not give back stays a string: a label "007", an id of twenty digits.
_INT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})").fullmatch
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]{0,14})(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?").fullmatch


@dataclass(frozen=True)
class Table:
    """A table's columns, but for the one of ids, and its rows by id."""

    names: tuple[str, ...] = ()
    rows: dict[str, tuple[str | None, ...]] = field(default_factory=dict)


class Types:
    """The types of columns as their values come by: all whole numbers, all numbers, or strings."""

    def __init__(self) -> None:
        self._found: dict[str, pa.DataType] = {}

    def see(self, table: Table) -> None:
        for name in table.names:
            self._found.setdefault(name, pa.null())
        for values in table.rows.values():
            for name, value in zip(table.names, values, strict=True):
                held = self._found[name]
                if value is None or held == pa.string():
                    continue
                if _INT(value):
                    self._found[name] = held if held == pa.float64() else pa.int64()
                else:
                    self._found[name] = pa.float64() if _FLOAT(value) else pa.string()

    def __iter__(self) -> Iterator[tuple[str, pa.DataType]]:
        """Each column and its type, in the order they were met; one with no value at all is of strings."""
        for name, kind in self._found.items():
            yield name, pa.string() if pa.types.is_null(kind) else kind


def typed(value: str | None, kind: pa.DataType) -> str | int | float | None:
    if value is None or pa.types.is_string(kind):
        return value
    return int(value) if pa.types.is_integer(kind) else float(value)


def read_table(path: str, *, key: str, prefix: str) -> Table:
    """A table by the labels in column `key`, whose `prefix` is taken off; without that column it tells of nobody."""
    lines = _lines(path)
    header = next(lines, [])
    if key not in header:
        return Table()
    at = header.index(key)
    # A name that is there twice means its first column.
    wanted = [place for place, name in enumerate(header) if place != at and name and header.index(name) == place]
    rows: dict[str, tuple[str | None, ...]] = {}
    for number, cells in enumerate(lines, 2):
        if len(cells) > len(header):
            raise BadRow(f"line {number:,} has {len(cells)} cells for {len(header)} columns", where=path, do=_TABS)
        cells += [""] * (len(header) - len(cells))
        values = tuple(None if cells[place] in NOTHING else cells[place] for place in wanted)
        rows.setdefault(cells[at].removeprefix(prefix), values)
    return Table(tuple(header[place] for place in wanted), rows)


_TABS = "cells are set apart by single tabs"


def _lines(path: str) -> Iterator[list[str]]:
    try:
        with open(path, encoding="utf-8-sig") as f:
            for line in f:
                if line.strip():
                    yield [cell.strip() for cell in line.rstrip("\n").split("\t")]
    except UnicodeDecodeError as error:
        raise BadFile("is not UTF-8", where=path, do="save it as UTF-8, which BIDS asks for") from error
    except OSError as error:
        raise BadFile(f"cannot be read ({error.strerror})", where=path) from error
