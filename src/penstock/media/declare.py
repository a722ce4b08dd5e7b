"""Features declared in a schema's metadata, kept true: as `datasets` reads them, for the columns that are there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from penstock.errors import UsageError
from penstock.media.kinds import leaves_of
from penstock.publish.features import declared_features, features_of, huggingface_metadata

KEY = b"huggingface"


def declare(schema: pa.Schema, *, known: Mapping[str, Any] | None = None) -> pa.Schema:
    """A schema that states its features, where it has media or a source had stated them. Steps drop, rename and change
    columns, and a reader that finds features of other columns refuses the file."""
    metadata = dict(schema.metadata or {})
    stated = metadata.pop(KEY, None)
    if stated is None and not known and not leaves_of(schema):
        return schema
    try:
        features = features_of(schema, known=known or declared_features(stated))
    except UsageError:  # a type that `datasets` has no feature for: other readers can do without
        return schema.with_metadata(metadata)
    return schema.with_metadata({**metadata, KEY: huggingface_metadata(features)})
