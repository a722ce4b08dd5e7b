"""Text: JSON, JSON lines, tables of commas or tabs, gradients, XML. Streamed, so that its length does not matter."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING
from xml.parsers import expat

from penstock.media.probes.reader import FEED, PIECE, Broken, Reader, Truncated

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

# A document up to here is parsed whole, at up to 25 times its size; a longer one by its tokens.
WHOLE = 1 << 20
# Of text of short lines, what is taken apart at once: a list of lines or places takes up to 40 times its bytes.
BLOCK = 256 << 10


def lines(reader: Reader) -> Iterator[bytes]:
    """Lines without their ends; one longer than a piece is refused, for formats of short lines."""
    rest = b""
    while piece := reader.piece(BLOCK):
        parts = (rest + piece).split(b"\n")
        rest = parts.pop()
        yield from parts
        if len(rest) > PIECE:
            raise Broken(f"a line before byte {reader.position:,} is longer than {PIECE:,} bytes")
    if rest:
        yield rest


# -- JSON ---------------------------------------------------------------------------------------------------------

_BLANK = b" \t\r\n"
_SPACE = rb"[ \t\r\n]*+"
_INSIDE = rb'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+'
_WORD = rb"(?:-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][-+]?[0-9]++)?+|true|false|null|NaN|-?Infinity)"
_SCALAR = rb"(?:" + _WORD + rb'|"' + _INSIDE + rb'")'
# Strings are taken apart on their own: one may be longer than any piece.
_TOKEN = re.compile(_SPACE + rb'(?:([\[\]{}:,"])|' + _WORD + rb"(?=[ \t\r\n,\]}]))")
_STRING = re.compile(_INSIDE)
_NAME = rb'"' + _INSIDE + rb'"' + _SPACE + rb":" + _SPACE
_NESTED = 3
_LONGEST_WORD = 4096  # of a number or a name: what is longer is neither


def json_text(reader: Reader, path: str) -> None:
    """One JSON value and nothing after it. NaN and Infinity pass, as Python's own writer makes them."""
    head = reader.read(WHOLE)
    if len(head) == WHOLE:
        tokens = Tokens()
        tokens.feed(head.removeprefix(codecs.BOM_UTF8))
        while piece := reader.piece(FEED):
            tokens.feed(bytes(piece))
        tokens.end()
        return
    try:
        json.loads(head)
    except RecursionError:
        tokens = Tokens()
        tokens.feed(head)
        tokens.end()
    except UnicodeDecodeError as error:
        raise Broken(f"it is not UTF-8 at byte {error.start:,}") from error
    except json.JSONDecodeError as error:
        if not head[error.pos :].strip() or error.pos >= len(head) or "Unterminated" in error.msg:
            raise Truncated(f"its JSON ends early: {error.msg} at line {error.lineno:,}") from error
        raise Broken(f"its JSON is malformed: {error.msg} at line {error.lineno:,}, column {error.colno:,}") from error


def json_lines(reader: Reader, path: str) -> None:
    """A JSON value on every line that is not blank."""
    number = 1
    line = _Line(number)
    while piece := bytes(reader.piece(FEED)):
        parts = piece.split(b"\n")
        for part in parts[:-1]:
            line.feed(part)
            line.end(Broken)
            number += 1
            line = _Line(number)
        line.feed(parts[-1])
    line.end(Truncated)


class _Line:
    """One line of JSON: parsed whole, or, once it is long, by its tokens."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._held = b""
        self._tokens: Tokens | None = None

    def feed(self, part: bytes) -> None:
        if self._tokens is None and len(self._held) + len(part) <= WHOLE:
            self._held += part
            return
        if self._tokens is None:
            self._tokens, part, self._held = Tokens(), self._held + part, b""
        with self._named():
            self._tokens.feed(part)

    def end(self, without_end: type[Broken]) -> None:
        """`without_end` is what it is called when the line does not parse."""
        if self._tokens is not None:
            with self._named():
                self._tokens.end()
        elif self._held.strip():
            try:
                json.loads(self._held)
            except ValueError as error:
                raise without_end(f"line {self._number:,} is no JSON: {_first_line(error)}") from error

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except Broken as error:
            raise type(error)(f"line {self._number:,}: {error}") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


@cache
def _runs() -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Many members of a list, or of an object, at once, each with its comma and nested a few levels deep: ten times as
    fast as token after token. The quantifiers give nothing back, so that a run of a million members keeps no ways to.
    """
    value = _SCALAR
    for _ in range(_NESTED):
        after = _SPACE + rb"(?:," + _SPACE + rb"(?![\]}])|(?=[\]}]))"
        listed = rb"\[" + _SPACE + rb"(?:" + value + after + rb")*+\]"
        named = rb"\{" + _SPACE + rb"(?:" + _NAME + value + after + rb")*+\}"
        value = rb"(?:" + _SCALAR + rb"|" + listed + rb"|" + named + rb")"
    comma = _SPACE + rb",)++"
    return re.compile(rb"(?:" + _SPACE + value + comma), re.compile(rb"(?:" + _SPACE + _NAME + value + comma)


class Tokens:
    """JSON fed in pieces. It holds one token, the depth it is at, and nothing else."""

    def __init__(self) -> None:
        self._rest = b""
        self._done = 0  # bytes before `_rest`
        self._inside: list[int] = []  # the bracket of each level
        # What may come next: a value, a value or the end of a list, a name or the end of an object, a name,
        # a colon, a comma or an end, nothing.
        self._next = "value"
        self._string = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def feed(self, data: bytes, *, last: bool = False) -> None:
        try:
            self._utf8.decode(data, last)
        except UnicodeDecodeError as error:
            raise Broken(f"it is not UTF-8 near byte {self._done + len(self._rest) + error.start:,}") from error
        text = self._rest + data
        at = 0
        while at < len(text):
            if self._string:
                at, whole = self._in_string(text, at)
                if not whole:
                    break
                continue
            run = self._run()
            if run is not None and (many := run.match(text, at)) is not None:
                at = many.end()
                continue
            match = _TOKEN.match(text, at)
            if match is None:
                left = text[at:].lstrip(_BLANK)
                if not last and len(left) < _LONGEST_WORD:
                    break
                if not left:
                    at = len(text)
                    break
                raise Broken(f"its JSON is malformed near byte {self._done + at:,}")
            at = match.end()
            if match[1]:
                self._mark(match[1][0], at)
            else:
                self._value(at)
        self._done += at
        self._rest = text[at:]

    def end(self) -> None:
        self.feed(b" ", last=True)
        if self._next != "nothing" or self._string:
            raise Truncated(f"its JSON ends inside {len(self._inside):,} open brackets")

    def _run(self) -> re.Pattern[bytes] | None:
        """What takes a run of plain members here. After it the state is what it is after a comma."""
        if self._next == "value" and self._inside and self._inside[-1] == ord("["):
            return _runs()[0]
        return _runs()[1] if self._next == "name" else None

    def _in_string(self, text: bytes, at: int) -> tuple[int, bool]:
        """How far a string goes in this piece, and whether it ends there."""
        found = _STRING.match(text, at)
        assert found is not None
        at = found.end()
        if at < len(text) and text[at] == 0x22:
            self._string = False
            if self._next == "name":
                self._next = "colon"
            else:
                self._value(at)
            return at + 1, True
        # An escape may be cut by the end of the piece; anything else is no string.
        if at < len(text) and not (text[at] == 0x5C and len(text) - at < 6):
            raise Broken(f"its JSON has a string that is malformed near byte {self._done + at:,}")
        return at, False

    def _value(self, at: int) -> None:
        if self._next not in ("value", "value or end"):
            raise self._misplaced("a value", at)
        self._next = "comma or end" if self._inside else "nothing"

    def _mark(self, byte: int, at: int) -> None:
        mark = chr(byte)
        expected = self._next
        if mark == '"':
            if expected in ("name", "name or end"):
                self._next = "name"
            elif expected not in ("value", "value or end"):
                raise self._misplaced("a string", at)
            self._string = True
        elif mark in "[{":
            if expected not in ("value", "value or end"):
                raise self._misplaced(f"`{mark}`", at)
            self._inside.append(byte)
            self._next = "value or end" if mark == "[" else "name or end"
        elif mark in "]}":
            opened = "[" if mark == "]" else "{"
            ends = ("comma or end", "value or end" if mark == "]" else "name or end")
            if not self._inside or chr(self._inside[-1]) != opened or expected not in ends:
                raise self._misplaced(f"`{mark}`", at)
            self._inside.pop()
            self._next = "comma or end" if self._inside else "nothing"
        elif mark == ":":
            if expected != "colon":
                raise self._misplaced("`:`", at)
            self._next = "value"
        else:
            if expected != "comma or end":
                raise self._misplaced("`,`", at)
            self._next = "value" if self._inside[-1] == ord("[") else "name"

    def _misplaced(self, what: str, at: int) -> Broken:
        return Broken(f"its JSON has {what} where none may be, near byte {self._done + at:,}")


# -- tables -------------------------------------------------------------------------------------------------------


def tsv(reader: Reader, path: str) -> None:
    _table(reader, b"\t")


def csv(reader: Reader, path: str) -> None:
    """Commas, or the semicolons that spreadsheets write where the comma is for decimals."""
    first = reader.peek(FEED).partition(b"\n")[0]
    _table(reader, b";" if first.count(b";") > first.count(b",") else b",")


def _table(reader: Reader, mark: bytes) -> None:
    """UTF-8, and every line of as many fields as the first; with quotes, or, where those do not pair, without."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    counts = [_Fields(mark, quotes=True), _Fields(mark, quotes=False)]
    ended = False
    while not ended:
        at = reader.position
        piece = reader.piece(BLOCK)
        ended = not piece
        try:
            utf8.decode(piece, ended)
        except UnicodeDecodeError as error:
            raise Broken(f"it is not UTF-8 at byte {at + error.start:,}") from error
        counts = [one for one in counts if one.feed(piece, last=ended)] or [_ragged(counts)]


class _Fields:
    """Counts the marks of each line in pieces, whatever the length of a line."""

    def __init__(self, mark: bytes, *, quotes: bool) -> None:
        self._mark, self._quotes = mark[0], quotes
        self._quoted = 0  # 1 inside quotes
        self._marks = 0  # of the line in hand
        self._blank = True  # nothing of the line in hand but its end
        self._lines = 0
        self._expected: int | None = None
        self.wrong: Broken | None = None

    def feed(self, piece: memoryview, *, last: bool) -> bool:
        import numpy as np

        data: Bytes = np.frombuffer(piece, np.uint8)
        if len(data):
            self._feed(data)
        if last and self.wrong is None and not self._blank:
            if self._quoted:
                self.wrong = Truncated("it ends inside quotes")
            else:
                self._line(self._marks, short=Truncated)
        return self.wrong is None

    def _feed(self, data: Bytes) -> None:
        import numpy as np

        ends, marks = data == 10, data == self._mark
        if self._quotes:
            quotes = (data == 34).view(np.uint8)
            quotes[0] ^= self._quoted
            inside = np.bitwise_xor.accumulate(quotes)
            self._quoted = int(inside[-1])
            outside = inside == 0
            ends &= outside
            marks &= outside
        stops = np.flatnonzero(ends)
        places = np.flatnonzero(marks)
        if not len(stops):
            self._marks += len(places)
            self._blank = self._blank and not np.any(data != 13)
            return
        before = np.searchsorted(places, stops)
        counts = np.diff(before, prepend=0)
        lengths = np.diff(stops, prepend=-1) - 1
        # A line of nothing, or of a carriage return alone, is no row.
        blank = (lengths == 0) | ((lengths == 1) & (data[stops - 1] == 13))
        blank[0] = self._blank and not np.any(data[: stops[0]] != 13)
        counts[0] += self._marks
        rows = np.flatnonzero(~blank)
        if len(rows):
            if self._expected is None:
                self._expected = int(counts[rows[0]])
            wrong = rows[counts[rows] != self._expected]
            if len(wrong):
                self._lines += int(wrong[0])
                self._line(int(counts[wrong[0]]), short=Broken)
                return
        self._lines += len(stops)
        self._marks = len(places) - int(before[-1])
        self._blank = not np.any(data[stops[-1] + 1 :] != 13)

    def _line(self, marks: int, *, short: type[Broken]) -> None:
        if self._expected is None or marks == self._expected:
            return
        kind = short if marks < self._expected else Broken
        self.wrong = kind(
            f"line {self._lines + 1:,} has {marks + 1:,} fields where the first has {self._expected + 1:,}"
        )


def _ragged(counts: list[_Fields]) -> _Fields:
    raise counts[0].wrong or Broken("its lines have different numbers of fields")


# -- other text ---------------------------------------------------------------------------------------------------


def numbers(reader: Reader, path: str) -> None:
    """Gradients: `.bval` is numbers, `.bvec` three rows (or columns) of them."""
    try:
        widths = [sum(1 for _ in map(float, line.split())) for line in lines(reader) if line.strip()]
    except ValueError as error:
        raise Broken(f"it holds what is no number ({error})") from error
    if not widths:
        raise Broken("it holds no numbers")
    if len(set(widths)) > 1:
        kind = Truncated if widths[-1] < widths[0] else Broken
        raise kind(f"its rows have {', '.join(map(str, sorted(set(widths))[:5]))} numbers")
    if path.lower().endswith(".bvec") and len(widths) != 3 and widths[0] != 3:
        raise Broken(f"it has {len(widths):,} rows of {widths[0]:,} numbers, and directions are three rows")


def plain(reader: Reader, path: str) -> None:
    """Text of no form: UTF-8, or else no problem of ours; read to its end."""
    reader.drain()


def xml(reader: Reader, path: str) -> None:
    """Well-formed to its end: GIFTI, SVG and the like."""
    parser = expat.ParserCreate()
    try:
        while piece := reader.piece(FEED):
            parser.Parse(bytes(piece), False)
        parser.Parse(b"", True)
    except expat.ExpatError as error:
        said = expat.ErrorString(error.code)
        early = error.code in (
            expat.errors.codes[expat.errors.XML_ERROR_NO_ELEMENTS],
            expat.errors.codes[expat.errors.XML_ERROR_UNCLOSED_TOKEN],
            expat.errors.codes[expat.errors.XML_ERROR_PARTIAL_CHAR],
            expat.errors.codes[expat.errors.XML_ERROR_UNCLOSED_CDATA_SECTION],
        )
        raise (Truncated if early else Broken)(f"its XML is malformed at line {error.lineno:,}: {said}") from error
