"""Films: MP4, MOV and their kin (boxes), WebM and Matroska (elements), AVI (RIFF chunks), followed to their end."""

from __future__ import annotations

import struct

from penstock.media.probes.nifti import begins_with
from penstock.media.probes.reader import Broken, Reader, Truncated

_EBML, _SEGMENT, _CLUSTER = 0x1A45DFA3, 0x18538067, 0x1F43B675
_MATROSKA_MASTERS = (_SEGMENT, _CLUSTER)


def boxes(reader: Reader, path: str) -> None:
    """Top-level boxes, which must fill the file; those of a film must hold its index."""
    kinds: set[bytes] = set()
    start = reader.peek(12)
    if start[4:8] not in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip", b"styp", b"jP  ", b"pnot"):
        raise Broken(f"it holds no MP4 boxes: {begins_with(start)}")
    brand = start[8:12]
    while head := reader.read(8):
        if len(head) < 8:
            # QuickTime ends some lists with four zero bytes.
            if any(head):
                raise Truncated(f"it ends at byte {reader.position:,}, inside the head of a box")
            break
        size, kind = struct.unpack(">I4s", head)
        name = kind.decode("latin-1")
        kinds.add(kind)
        if size == 0:
            reader.drain()
            break
        if size == 1:
            (size,) = struct.unpack(">Q", reader.exactly(8, f"the head of box {name!r}"))
            size -= 8
        if size < 8:
            raise Broken(f"box {name!r} before byte {reader.position:,} has a size of {size}")
        if not name.isprintable():
            raise Broken(f"there is no box at byte {reader.position - 8:,}, but {head.hex(' ')}")
        reader.skip(size - 8, f"its box {name!r}")
    picture = b"meta" in kinds or start[4:8] == b"jP  "
    if not picture and not kinds & {b"moov", b"moof"}:
        raise Truncated(f"it has no index (box 'moov'), as a recording that was cut short (brand {brand!r})")


def matroska(reader: Reader, path: str) -> None:
    """Elements of the top level, of the segment and of clusters, which must fill what holds them."""
    if reader.peek(4) != b"\x1a\x45\xdf\xa3":
        raise Broken(f"it is no WebM or Matroska: {begins_with(reader.peek(256))}")
    ends: list[int | None] = []
    clusters = 0
    while reader.peek(1):
        while ends and ends[-1] is not None and reader.position >= ends[-1]:
            ends.pop()
        element = _vint(reader, "an element's name", keep=True)
        size = _vint(reader, "an element's size", keep=False)
        stop = None if size is None else reader.position + size
        above = next((end for end in reversed(ends) if end is not None), None)
        if stop is not None and above is not None and stop > above:
            raise Broken(f"an element before byte {reader.position:,} is longer than what holds it")
        if element == _CLUSTER:
            clusters += 1
        if element in _MATROSKA_MASTERS:
            ends.append(stop)
        elif size is None:
            raise Broken(f"an element before byte {reader.position:,} has no size")
        else:
            reader.skip(size, "an element")
    if any(end is not None and end > reader.position for end in ends):
        raise Truncated(f"it ends at byte {reader.position:,}, before the end of its segment")
    if not clusters:
        raise Truncated("it holds no cluster, and so no picture")


def _vint(reader: Reader, what: str, *, keep: bool) -> int | None:
    """A number of one to eight bytes; None for "not known"."""
    first = reader.exactly(1, what)[0]
    if not first:
        raise Broken(f"there is no element at byte {reader.position - 1:,}, but a zero byte")
    length = 9 - first.bit_length()
    value = int.from_bytes(bytes([first]) + reader.exactly(length - 1, what), "big")
    if keep:
        return value
    value &= (1 << (7 * length)) - 1
    return None if value == (1 << (7 * length)) - 1 else value


def riff(reader: Reader, path: str, *, forms: tuple[bytes, ...], order: str = "<") -> set[bytes]:
    """The chunks of RIFF (or of big-endian FORM): each must be there whole. Their names."""
    seen: set[bytes] = set()
    while len(head := reader.read(12)) == 12:
        magic, length, form = struct.unpack(f"{order}4sI4s", head)
        if magic not in (b"RIFF", b"RF64", b"BW64", b"FORM") or form not in forms:
            if seen:
                break
            raise Broken(f"it is not {forms[0].decode().strip()}: {begins_with(head)}")
        # A writer to a pipe cannot come back to fill in the length: it is 0 or the largest there is.
        streamed = length in (0, 0xFFFFFFFF)
        end = reader.position - 4 + length
        wide: int | None = None
        while streamed or reader.position + 8 <= end:
            chunk = reader.read(8)
            if len(chunk) < 8:
                if streamed:
                    break
                raise Truncated(f"it ends at byte {reader.position:,}, and its header asks for {end:,} bytes")
            kind, size = struct.unpack(f"{order}4sI", chunk)
            name = kind.decode("latin-1")
            seen.add(kind)
            if kind == b"ds64":
                wide = struct.unpack_from("<Q", reader.peek(16), 8)[0]
            if kind == b"data" and size == 0xFFFFFFFF and wide is not None:
                size = wide
            elif kind == b"data" and streamed and size in (0, 0xFFFFFFFF):
                reader.drain()
                break
            reader.skip(size, f"its chunk {name!r}")
            if size & 1 and not reader.read(1):
                break
        if streamed:
            break
    reader.drain()
    if not seen:
        raise Truncated(f"it ends at byte {reader.position:,}, inside the header")
    return seen


def avi(reader: Reader, path: str) -> None:
    seen = riff(reader, path, forms=(b"AVI ", b"AVIX"))
    if b"LIST" not in seen:
        raise Truncated("it holds no streams")
