"""Meshes: STL, PLY, OBJ, OFF and glTF, with as many triangles, points and faces as they say."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from penstock.media.probes.nifti import begins_with
from penstock.media.probes.reader import PIECE, Broken, FileReader, Reader, Truncated
from penstock.media.probes.text import json_text, lines

_PLY_BYTES = {
    "char": 1, "uchar": 1, "int8": 1, "uint8": 1, "short": 2, "ushort": 2, "int16": 2, "uint16": 2,
    "int": 4, "uint": 4, "int32": 4, "uint32": 4, "float": 4, "float32": 4, "double": 8, "float64": 8,
}  # fmt: skip


def stl(reader: Reader, path: str) -> None:
    """Binary: 84 bytes and 50 for each triangle. Text: from `solid` to `endsolid`."""
    head = reader.peek(84)
    count = int.from_bytes(head[80:84], "little")
    whole = len(head) == 84 and isinstance(reader, FileReader) and reader.size == 84 + 50 * count
    if not whole and head.lstrip().startswith(b"solid") and b"\0" not in head:
        last = b""
        triangles = 0
        for line in lines(reader):
            word = line.strip()
            triangles += word.startswith(b"endfacet")
            last = word or last
        if not last.startswith(b"endsolid"):
            raise Truncated(f"it ends after {triangles:,} triangles without `endsolid`")
        return
    reader.exactly(84, "the header")
    for _ in reader.pieces(50 * count, f"its {count:,} triangles"):
        pass
    if extra := reader.drain():
        raise Broken(f"its header says {count:,} triangles, and {extra:,} bytes follow them")


def ply(reader: Reader, path: str) -> None:
    """As many of each element as the header says."""
    form, elements = _ply_header(reader)
    if form == "ascii":
        expected = sum(count for count, _ in elements)
        got = sum(1 for line in lines(reader) if line.strip())
        if got < expected:
            raise Truncated(f"its header asks for {expected:,} lines, and it holds {got:,}")
        return
    order = "little" if form == "binary_little_endian" else "big"
    for count, properties in elements:
        if all(len(kinds) == 1 for kinds in properties):
            reader.skip(count * sum(_PLY_BYTES[kinds[0]] for kinds in properties), "its elements")
        else:
            _ply_lists(reader, count, properties, order)
    reader.drain()


def _ply_header(reader: Reader) -> tuple[str, list[tuple[int, list[tuple[str, ...]]]]]:
    head = reader.peek(PIECE)
    end = head.find(b"end_header")
    if not head.startswith(b"ply"):
        raise Broken(f"it is not PLY: {begins_with(head)}")
    stop = head.find(b"\n", end)
    if end < 0 or stop < 0:
        raise Truncated("its header has no end")
    form = ""
    elements: list[tuple[int, list[tuple[str, ...]]]] = []
    for line in head[:end].decode("ascii", "replace").splitlines():
        words = line.split()
        match words:
            case ["format", form, *_]:
                pass
            case ["element", _, count]:
                elements.append((int(count), []))
            case ["property", "list", of, kind, _]:
                elements[-1][1].append((of, kind))
            case ["property", kind, _]:
                elements[-1][1].append((kind,))
    if form not in ("ascii", "binary_little_endian", "binary_big_endian"):
        raise Broken(f"its format is {form!r}")
    reader.skip(stop + 1, "the header")
    return form, elements


def _ply_lists(reader: Reader, count: int, properties: list[tuple[str, ...]], order: str) -> None:
    """Elements with lists, whose lengths stand before them: read one by one."""
    sizes = [tuple(_PLY_BYTES[kind] for kind in kinds) for kinds in properties]
    for _ in range(count):
        for size in sizes:
            if len(size) == 1:
                reader.skip(size[0], "its elements")
            else:
                long = int.from_bytes(reader.exactly(size[0], "its elements"), "little" if order == "little" else "big")
                reader.skip(long * size[1], "its elements")


def obj(reader: Reader, path: str) -> None:
    """Points are numbers, and no face names a point that is not there."""
    points = furthest = 0
    for at, line in enumerate(lines(reader), 1):
        try:
            if line.startswith(b"v "):
                points += 1
                if len([float(word) for word in line.split()[1:]]) < 3:
                    raise Broken(f"line {at:,} has a point of fewer than three numbers")
            elif line.startswith(b"f "):
                furthest = max(furthest, *(int(word.partition(b"/")[0]) for word in line.split()[1:]))
        except ValueError as error:
            raise Broken(f"line {at:,} holds what is no number ({error})") from error
    if furthest > points:
        raise Truncated(f"a face names point {furthest:,}, and it has {points:,}")
    if not points:
        raise Broken("it holds no points")


def off(reader: Reader, path: str) -> None:
    """As many lines as the points and faces it counts."""
    words = _off_words(reader)
    first = next(words, [])
    if not first or not first[0].endswith(b"OFF"):
        raise Broken("it is not OFF")
    counts = first[1:] or next(words, [])
    if len(counts) < 2:
        raise Truncated("it ends before its counts")
    expected = int(counts[0]) + int(counts[1])
    got = sum(1 for _ in words)
    if got < expected:
        raise Truncated(f"it counts {expected:,} points and faces, and holds {got:,}")


def _off_words(reader: Reader) -> Iterator[list[bytes]]:
    for line in lines(reader):
        if found := line.partition(b"#")[0].split():
            yield found


def glb(reader: Reader, path: str) -> None:
    """glTF in one file: its length, and chunks that fill it."""
    magic, version, length = struct.unpack("<4s2I", reader.exactly(12, "the header"))
    if magic != b"glTF":
        raise Broken(f"it is not glTF: {begins_with(magic)}")
    chunks = 0
    while reader.position < length:
        size, kind = struct.unpack("<I4s", reader.exactly(8, "the head of a chunk"))
        if not chunks and kind != b"JSON":
            raise Broken(f"its first chunk is {kind!r}, not JSON")
        reader.skip(size, f"its chunk {chunks}")
        chunks += 1
    if not chunks:
        raise Truncated(f"it holds nothing (version {version})")
    reader.drain()


def gltf(reader: Reader, path: str) -> None:
    json_text(reader, path)
