"""`penstock show`: the schema and the first rows of a dataset or a pipeline."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import options

if TYPE_CHECKING:
    import pyarrow as pa

HELP = "show the columns and the first rows of a dataset or a pipeline.yaml"
WIDEST = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_source(parser)
    parser.add_argument("-n", "--rows", type=int, default=3, metavar="N", help="how many rows (default: 3)")
    parser.add_argument("--full", action="store_true", help="do not shorten long values")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    if len(args.source) == 1 and args.source[0].endswith((".yaml", ".yml")):
        from penstock.pipeline import load

        dataset = load(Path(args.source[0])).dataset
    else:
        dataset = options.dataset(args)
    with _prints_to_stderr():
        schema, rows = dataset.schema, dataset.head(args.rows)
    schema, rows = stored_view(schema, rows)
    if args.json:
        columns = {field.name: str(field.type) for field in schema}
        print(json.dumps({"schema": columns, "rows": rows}, default=_as_text))
        return 0
    width = max((len(name) for name in schema.names), default=0)
    for field in schema:
        print(f"{field.name:<{width}}  {field.type}")
    for at, row in enumerate(rows):
        print(f"\nrow {at}")
        for name, value in row.items():
            print(f"  {name:<{width}}  {_shown(value, None if args.full else WIDEST)}")
    return 0


def stored_view(schema: pa.Schema, rows: list[dict[str, Any]]) -> tuple[pa.Schema, list[dict[str, Any]]]:
    """Media as they will be stored: where a file lies on this machine is nobody's business but the plan's."""
    from penstock.media.kinds import leaves_of, stored_schema

    if not leaves_of(schema):
        return schema, rows
    return stored_schema(schema), [{name: _without_places(value) for name, value in row.items()} for row in rows]


def _without_places(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_places(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"bytes", "path", "file", "size", "modified"}:
        return {"path": value["path"], "size": value["size"]}
    return {name: _without_places(one) for name, one in value.items()}


@contextlib.contextmanager
def _prints_to_stderr() -> Iterator[None]:
    """What a user's function prints, from Python or below it, is not what we show."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _shown(value: Any, widest: int | None) -> str:
    text = json.dumps(value, ensure_ascii=False, default=_as_text)
    return text if widest is None or len(text) <= widest else f"{text[:widest]}… ({len(text):,} characters)"


def _as_text(value: Any) -> str:
    return f"<{len(value):,} bytes>" if isinstance(value, bytes) else str(value)
