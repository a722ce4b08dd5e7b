"""Thrift's compact protocol: structs taken apart and put together again without loss.

A struct is a dict of field id to (kind, payload bytes). A payload is decoded only where someone looks, so fields nobody
here has heard of pass through untouched. Data is not trusted: every length is checked, nesting is limited, and what
does not hold raises `ThriftError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

STOP, TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT, UUID = range(14)

Struct = dict[int, tuple[int, bytes]]

# Parquet's own structs nest seven deep. Python's stack holds this many frames many times over.
DEPTH = 64

_FIXED = {TRUE: 1, FALSE: 1, BYTE: 1, DOUBLE: 8, UUID: 16}
_NUMBER = rb"[\x80-\xff]{0,9}+[\x00-\x7f]"
_VARINT = re.compile(_NUMBER).match


def _plain_fields() -> re.Pattern[bytes]:
    """Runs of whole fields: numbers, short strings, short lists of either, and structs of these.

    One step of C in place of some twenty of Python: a footer of 50,000 column chunks opens three times as fast. What it
    does not know it leaves to `skip`. Every repeat is possessive, so no input can make it go back.
    """

    def heads(*kinds: int) -> bytes:
        return b"[" + b"".join(b"\\x%02x" % (delta << 4 | kind) for delta in range(1, 16) for kind in kinds) + b"]"

    def items(kinds: tuple[int, ...], item: bytes, counts: range) -> bytes:
        of = (b"[%b](?>%b){%d}" % (b"".join(b"\\x%02x" % (n << 4 | kind) for kind in kinds), item, n) for n in counts)
        return heads(LIST) + b"(?>%b)" % b"|".join(of)

    def struct(fields: bytes) -> bytes:
        return b"(?>%b)*+\\x00" % fields

    whole = (I16, I32, I64)
    number = heads(*whole) + _NUMBER
    short = b"(?>" + b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(25)) + b")"
    flat = b"|".join(
        (
            number,
            heads(BINARY) + short,
            heads(TRUE, FALSE),
            items(whole, _NUMBER, range(9)),
            items((BINARY,), short, range(1, 2)),
            items((STRUCT,), struct(number), range(1, 4)),
        )
    )
    nested = flat + b"|" + heads(STRUCT) + struct(flat)
    return re.compile(b"(?>%b|%b)*+" % (nested, heads(STRUCT) + struct(nested)), re.DOTALL)


_PLAIN_FIELDS = _plain_fields().match


class ThriftError(ValueError):
    """The bytes are not what the compact protocol can mean."""


class CutShortError(ThriftError):
    """The bytes stop inside a value: with more of them it might be whole."""


def read_struct(data: bytes, pos: int = 0) -> tuple[Struct, int]:
    """The struct that starts at `pos`, and where it ends."""
    struct: Struct = {}
    last = 0
    while True:
        last, kind, pos = field(data, pos, last)
        if kind == STOP:
            return struct, pos
        if I16 <= kind <= I64 and (match := _VARINT(data, pos)):
            end = match.end()
        else:
            end = pos if kind <= FALSE else skip(data, pos, kind)
        if last in struct:
            raise ThriftError(f"field {last} is there twice")
        struct[last] = kind, data[pos:end]
        pos = end


def write_struct(struct: Struct, last: int = 0) -> bytes:
    """The bytes of a struct, fields in order of id; or of its end, if the fields up to `last` are written already.

    >>> write_struct({1: (I32, zigzag(2)), 4: (BINARY, binary(b"id"))}).hex()
    '15043802696400'
    """
    out = bytearray()
    for number in sorted(struct):
        kind, payload = struct[number]
        if 0 < number - last < 16:
            out.append(number - last << 4 | kind)
        else:
            out.append(kind)
            out += zigzag(number)
        out += payload
        last = number
    out.append(STOP)
    return bytes(out)


def read_list(data: bytes, pos: int = 0) -> tuple[int, list[bytes]]:
    """The kind of a list's items, and the payload of each."""
    count, kind, pos = list_head(data, pos)
    payloads = []
    for _ in range(count):
        end = skip(data, pos, kind)
        payloads.append(data[pos:end])
        pos = end
    return kind, payloads


def write_list(kind: int, payloads: Iterable[bytes]) -> bytes:
    items = list(payloads)
    return write_list_head(kind, len(items)) + b"".join(items)


def write_list_head(kind: int, count: int) -> bytes:
    return bytes([count << 4 | kind]) if count < 15 else bytes([0xF0 | kind]) + _varint(count)


def field(data: bytes, pos: int, last: int) -> tuple[int, int, int]:
    """The id and kind of the field whose header is at `pos`, after field `last`, and where its payload starts.

    At the end of the struct the kind is STOP.
    """
    if pos >= len(data):
        raise CutShortError("ends inside a struct")
    head = data[pos]
    pos += 1
    if head == STOP:
        return last, STOP, pos
    kind = head & 15
    if kind == STOP:
        raise ThriftError("there is no kind 0")
    if head >= 16:
        last += head >> 4
    else:
        number, pos = varint(data, pos)
        last = number >> 1 ^ -(number & 1)
    if not -0x8000 <= last < 0x8000:
        raise ThriftError(f"no field can be number {last}")
    return last, kind, pos


def list_head(data: bytes, pos: int) -> tuple[int, int, int]:
    """How many items a list holds, their kind, and where the first one starts."""
    if pos >= len(data):
        raise CutShortError("ends before a list")
    head = data[pos]
    pos += 1
    count = head >> 4
    if count == 15:
        count, pos = varint(data, pos)
    # Every item takes a byte or more, so a count beyond what is left cannot be true and must not be believed.
    if count > len(data) - pos:
        raise CutShortError(f"a list of {count:,} items does not fit")
    return count, head & 15, pos


def varint(data: bytes, pos: int) -> tuple[int, int]:
    """An unsigned number of at most 64 bits, and where it ends."""
    if pos < len(data) and data[pos] < 0x80:
        return data[pos], pos + 1
    match = _VARINT(data, pos)
    if match is None:
        raise CutShortError("a number has no end")
    end = match.end()
    value = 0
    for byte in reversed(match[0]):
        value = value << 7 | byte & 0x7F
    if value >> 64:
        raise ThriftError("a number has more than 64 bits")
    return value, end


def skip(data: bytes, pos: int, kind: int, depth: int = 0) -> int:
    """Where the value that starts at `pos` ends."""
    if kind == BINARY:
        length, pos = varint(data, pos)
        return _within(data, pos + length)
    if kind == STRUCT:
        return _skip_struct(data, pos, depth + 1)
    if I16 <= kind <= I64:
        match = _VARINT(data, pos)
        if match is None:
            raise CutShortError("a number has no end")
        return match.end()
    if kind in (LIST, SET):
        count, kind, pos = list_head(data, pos)
        if kind in _FIXED:
            return _within(data, pos + count * _FIXED[kind])
        _not_too_deep(depth)
        for _ in range(count):
            pos = skip(data, pos, kind, depth + 1)
        return pos
    if kind in _FIXED:
        return _within(data, pos + _FIXED[kind])
    if kind == MAP:
        return _skip_map(data, pos, depth + 1)
    raise ThriftError(f"there is no kind {kind}")


def _skip_struct(data: bytes, pos: int, depth: int) -> int:
    _not_too_deep(depth)
    while True:
        pos = _PLAIN_FIELDS(data, pos).end()  # type: ignore[union-attr]  # it matches an empty run too
        if pos >= len(data):
            raise CutShortError("ends inside a struct")
        head = data[pos]
        pos += 1
        if head == STOP:
            return pos
        if head < 16:
            pos = skip(data, pos, I16)
        if head & 15 > FALSE:
            pos = skip(data, pos, head & 15, depth)
        elif head & 15 == STOP:
            raise ThriftError("there is no kind 0")


def _skip_map(data: bytes, pos: int, depth: int) -> int:
    _not_too_deep(depth)
    count, pos = varint(data, pos)
    if count == 0:
        return pos
    if count > len(data) - pos:
        raise CutShortError(f"a map of {count:,} pairs does not fit")
    kinds = data[pos]
    pos += 1
    for _ in range(count):
        pos = skip(data, skip(data, pos, kinds >> 4, depth), kinds & 15, depth)
    return pos


def _within(data: bytes, end: int) -> int:
    if end > len(data):
        raise CutShortError(f"{end - len(data):,} bytes are missing")
    return end


def _not_too_deep(depth: int) -> None:
    if depth > DEPTH:
        raise ThriftError(f"nests more than {DEPTH} deep")


def integer(struct: Struct, number: int) -> int:
    """A field that must be there and be a whole number."""
    value = integer_or_none(struct, number)
    if value is None:
        raise ThriftError(f"field {number} is missing")
    return value


def integer_or_none(struct: Struct, number: int) -> int | None:
    if number not in struct:
        return None
    kind, payload = struct[number]
    return read_integer(kind, payload)


def read_integer(kind: int, data: bytes, pos: int = 0) -> int:
    if not I16 <= kind <= I64:
        raise ThriftError(f"kind {kind} where a number should be")
    value, _ = varint(data, pos)
    return value >> 1 ^ -(value & 1)


def raw(struct: Struct, number: int, kind: int) -> bytes:
    """The payload of a field that must be there and be of this kind."""
    if number not in struct:
        raise ThriftError(f"field {number} is missing")
    found, payload = struct[number]
    if found != kind:
        raise ThriftError(f"field {number} is of kind {found}, not {kind}")
    return payload


def string(payload: bytes) -> bytes:
    """What a BINARY payload holds."""
    return payload[varint(payload, 0)[1] :]


def binary(value: bytes) -> bytes:
    return _varint(len(value)) + value


def zigzag(value: int) -> bytes:
    """The payload of an I16, I32 or I64."""
    return _varint(value << 1 if value >= 0 else (-value << 1) - 1)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
