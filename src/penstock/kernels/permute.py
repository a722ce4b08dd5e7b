"""A 64-bit key for every row, mixed from a seed and the row's identity: what sampling and shuffling order by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: Keys) -> Keys:
    """The finalizer of splitmix64, a bijection on 64 bits in which every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def row_keys(ordinals: Keys, parts: Keys, *, file: int, seed: int) -> Keys:
    """Keys of rows by (seed, file, ordinal, sub-ordinal). Rows of one file never share a key at equal sub-ordinals."""
    with np.errstate(over="ignore"):
        start = np.array([seed % 2**64], np.uint64)
        stream = mix(mix(start + _GOLDEN) + np.uint64(file + 1) * _GOLDEN)
        keys = mix(ordinals * _GOLDEN + stream)
        return mix(keys ^ mix(parts * _GOLDEN)) if parts.any() else mix(keys)
