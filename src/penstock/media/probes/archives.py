"""Archives: zip (and what is a zip inside: npz, docx, xlsx) and tar, every member read to its end."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.media.probes.nifti import begins_with
from penstock.media.probes.reader import FEED, PIECE, Broken, FileReader, Reader, Truncated

_END, _END64, _LOCATOR, _ENTRY, _LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_LONGEST_COMMENT = 65_535
BLOCK = 512


@dataclass(frozen=True)
class _Member:
    name: str
    offset: int
    stored: int
    size: int
    crc: int
    method: int
    encrypted: bool


def zipped(reader: Reader, path: str) -> None:
    """Every member inflated and its CRC compared. Members lie in the order of the directory, nearly always: then the
    whole is one pass; one that lies before what was read is read by place."""
    if not isinstance(reader, FileReader):
        reader.drain()
        return
    head = reader.peek(4)
    if head[:2] != b"PK":
        raise Broken(f"it is not a zip: {begins_with(head)}")
    for member in _members(reader):
        if member.encrypted:
            continue
        in_order = member.offset >= reader.position
        if in_order:
            reader.skip(member.offset - reader.position, "a stretch between members")
            local = reader.exactly(30, f"the header of {member.name}")
        else:
            local = reader.at(member.offset, 30)
        if local[:4] != _LOCAL:
            raise Broken(f"there is no member where its directory says {member.name} is (byte {member.offset:,})")
        named, extra = struct.unpack_from("<2H", local, 26)
        if in_order:
            reader.skip(named + extra, f"the header of {member.name}")
            data = reader.pieces(member.stored, member.name)
        else:
            data = _pieces_at(reader, member.offset + 30 + named + extra, member.stored, member.name)
        _check_member(member, data)
    reader.drain()


def _check_member(member: _Member, data: Iterator[memoryview]) -> None:
    if member.method not in (0, 8):
        for _ in data:
            pass
        return
    codec = zlib.decompressobj(wbits=-15)
    crc = size = 0
    for piece in data:
        for start in range(0, len(piece), FEED):
            left: bytes | memoryview = piece[start : start + FEED]
            while True:
                try:
                    out = left if member.method == 0 else codec.decompress(left, PIECE)
                except zlib.error as error:
                    raise Broken(f"its member {member.name} is damaged ({error})") from error
                crc, size = zlib.crc32(out, crc), size + len(out)
                left = b"" if member.method == 0 else codec.unconsumed_tail
                if not left and len(out) < PIECE:
                    break
    if size != member.size or crc != member.crc:
        what = f"{size:,} bytes, not {member.size:,}" if size != member.size else "another CRC than its directory says"
        raise Broken(f"its member {member.name} is damaged: it has {what}")


def _pieces_at(reader: FileReader, offset: int, count: int, name: str) -> Iterator[memoryview]:
    while count > 0:
        piece = reader.at(offset, min(PIECE, count))
        if not piece:
            raise Truncated(f"it ends inside its member {name}")
        yield memoryview(piece)
        offset, count = offset + len(piece), count - len(piece)


def _members(reader: FileReader) -> Iterator[_Member]:
    """The directory, an entry at a time: a zip of a million members is not held."""
    size = reader.size
    tail_at = max(0, size - _LONGEST_COMMENT - 22)
    tail = reader.at(tail_at, size - tail_at)
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < 22:
        raise Truncated("it has no directory at its end, as a zip that was cut short")
    count, length, start = struct.unpack_from("<H2I", tail, at + 10)
    end = tail_at + at
    if at >= 20 and tail[at - 20 : at - 16] == _LOCATOR:
        (place,) = struct.unpack_from("<Q", tail, at - 12)
        record = reader.at(place, 56)
        if record[:4] != _END64 or len(record) < 56:
            raise Broken(f"its 64-bit directory is not where it says (byte {place:,})")
        count, length, start = struct.unpack_from("<3Q", record, 32)
        end = place
    # What was put before the first member (a self-extracting program) moves every offset.
    moved = end - length - start
    if moved < 0:
        raise Truncated(f"its directory of {length:,} bytes at {start:,} goes beyond its end")
    at = start + moved
    for _ in range(count):
        fixed = reader.at(at, 46)
        if fixed[:4] != _ENTRY or len(fixed) < 46:
            raise Broken(f"its directory is damaged at byte {at:,}")
        flags, method = struct.unpack_from("<2H", fixed, 8)
        crc, stored, unpacked, named, extra, comment = struct.unpack_from("<3I3H", fixed, 16)
        (offset,) = struct.unpack_from("<I", fixed, 42)
        rest = reader.at(at + 46, named + extra)
        name = rest[:named].decode("utf-8" if flags & 0x800 else "cp437", "replace")
        unpacked, stored, offset = _wide(rest[named:], unpacked, stored, offset)
        if offset + moved + stored > reader.size:
            raise Truncated(f"its member {name} goes beyond its end")
        yield _Member(name, offset + moved, stored, unpacked, crc, method, bool(flags & 1))
        at += 46 + named + extra + comment


def _wide(extra: bytes, *values: int) -> tuple[int, ...]:
    """Sizes that did not fit 32 bits are in a field of their own, in this order, only those."""
    at, found = 0, list(values)
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            place = at + 4
            for index, value in enumerate(values):
                if value == 0xFFFFFFFF and place + 8 <= at + 4 + length:
                    (found[index],) = struct.unpack_from("<Q", extra, place)
                    place += 8
        at += 4 + length
    return tuple(found)


def tar(reader: Reader, path: str) -> None:
    """Every header's checksum, every member's bytes, and the end mark."""
    override: int | None = None
    members = 0
    while True:
        head = reader.read(BLOCK)
        if not head and members:
            raise Truncated(f"it ends after {members:,} members without the two empty blocks that end a tar")
        if len(head) < BLOCK:
            raise Truncated(f"it ends at byte {reader.position:,}, inside a header")
        if not any(head):
            if not members and any(reader.peek(BLOCK)):
                raise Broken("it begins with an empty block")
            reader.drain()
            return
        stated = head[148:156].strip(b" \0")
        if not stated.isdigit() or int(stated, 8) not in _checksums(head):
            what = f"it is not a tar: {begins_with(head)}" if not members else f"a header is damaged, after {members:,}"
            raise Broken(what)
        size = override if override is not None else _number(head[124:136])
        kind = head[156:157]
        override = None
        padded = -(-size // BLOCK) * BLOCK
        name = head[:100].rstrip(b"\0").decode("utf-8", "replace")
        if kind in (b"1", b"2", b"3", b"4", b"5", b"6"):
            padded = 0  # links, devices and folders have no bytes, whatever they say
        if kind == b"x" and size <= PIECE:
            override = _pax_size(reader.exactly(padded, f"the attributes of {name}")[:size])
        else:
            reader.skip(padded, f"its member {name}")
        members += 1


def _checksums(head: bytes) -> tuple[int, int]:
    """Of the header with its checksum as spaces; some old tars summed signed bytes."""
    rest = head[:148] + b" " * 8 + head[156:]
    return sum(rest), sum(byte - 256 if byte > 127 else byte for byte in rest)


def _number(field: bytes) -> int:
    if field[:1] in (b"\x80", b"\xff"):
        return int.from_bytes(field[1:], "big")
    text = field.strip(b" \0") or b"0"
    if not all(48 <= byte < 56 for byte in text):
        raise Broken(f"a header has a size that is no number: {field!r}")
    return int(text, 8)


def _pax_size(records: bytes) -> int | None:
    found = None
    while records:
        length, _, rest = records.partition(b" ")
        if not length.isdigit() or int(length) <= len(length) + 1:
            raise Broken("a header's attributes are damaged")
        key, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
        if key == b"size":
            found = int(value)
        records = records[int(length) :]
    return found
