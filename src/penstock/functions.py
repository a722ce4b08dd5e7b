"""What a function is, told by its content: the same code over the same values has the same fingerprint in any process.

Pickles will not do: they hold file names and line numbers, and order sets by a hash that changes with the process.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, GenericAlias, MethodType, ModuleType, UnionType
from typing import Any, TypeVar, get_origin

import numpy as np
import pyarrow as pa

from penstock.errors import UsageError

_PYTHON = f"python {sys.version_info.major}.{sys.version_info.minor}"
_STDLIB = Path(dis.__file__).parent
_ARROW_ROWS = 1 << 16  # Arrow data is hashed in slices of this many rows, so that none is copied whole
_FAIL = "pass it as a plain value, or give the step a version= of your own"

# Instructions that read a name from outside the function; the last four are of class bodies, before and since 3.12.
_OUTER = frozenset(
    {
        "LOAD_GLOBAL",
        "LOAD_DEREF",
        "LOAD_NAME",
        "LOAD_CLASSDEREF",
        "LOAD_FROM_DICT_OR_GLOBALS",
        "LOAD_FROM_DICT_OR_DEREF",
    }
)
# Where a function lives is not what it does.
_PLACES = frozenset({"__file__", "__spec__", "__loader__", "__builtins__", "__cached__", "__path__"})
# What a class carries besides what it does: its place, and caches.
_CLASS_EXTRAS = _PLACES | {
    "__abstractmethods__", "__annotations__", "__dataclass_fields__", "__dataclass_params__", "__dict__", "__doc__",
    "__firstlineno__", "__module__", "__orig_bases__", "__parameters__", "__qualname__", "__static_attributes__",
    "__weakref__", "_abc_impl",
}  # fmt: skip


def fingerprint(fn: Callable[..., object]) -> str:
    """A digest of a function's code, defaults, closure and the globals it reads, and so on into the code it calls.

    Code of `__main__` and of local files is walked; installed modules count by version, the standard library by
    Python's. File names and line numbers do not count.
    """
    walk = _Walk()
    try:
        walk.value(fn)
    except _NoFingerprintError as error:
        raise UsageError(f"{describe(fn)} uses {error}", do=_FAIL) from error.__cause__
    return walk.digest().hex()


def describe(fn: Callable[..., object]) -> str:
    """A function as messages name it: with its module, or its line where the module says too little.

    >>> describe(len)
    'len (builtins)'
    """
    inner: object = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = getattr(inner, "__wrapped__", inner)  # a decorator's line is not the one to look at
    if not hasattr(inner, "__qualname__"):
        inner = type(inner)
    name = str(getattr(inner, "__qualname__", inner)).rpartition("<locals>.")[2]
    module = getattr(inner, "__module__", None) or "builtins"
    code = getattr(inner, "__code__", None)
    if code is not None and (name == "<lambda>" or module == "__main__"):
        return f"{name} (line {code.co_firstlineno} of {Path(code.co_filename).name})"
    return f"{name} ({module})"


def name_of(fn: Callable[..., object]) -> str:
    """A function's own name: what a plan shows, wherever the function stands.

    >>> name_of(len)
    'len'
    """
    return describe(fn).partition(" (")[0]


class _NoFingerprintError(Exception):
    """A value with no content to go by; the text says which."""


class _Walk:
    """One pass over a function and all it refers to, hashed as it goes.

    `seen` numbers functions, classes and modules in the order met. Values are told by content, never by identity: two
    equal strings may or may not be one object. `path` holds the values being walked, to end cycles among them.
    """

    def __init__(self) -> None:
        self.seen: dict[object, tuple[int, object]] = {}
        self.path: list[int] = []
        self.trail: list[str] = []
        self.reducing = False
        self._hash = hashlib.sha256()

    def aside(self) -> _Walk:
        """A walk that knows what this one has met, and tells it nothing."""
        walk = _Walk()
        walk.seen, walk.path, walk.trail = dict(self.seen), list(self.path), self.trail
        walk.reducing = self.reducing
        return walk

    def digest(self) -> bytes:
        return self._hash.digest()

    def put(self, tag: str, *parts: str | bytes) -> None:
        """Hash a tag and parts, each with its length, so that no two lists of parts read the same."""
        for part in (tag, *parts):
            data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
            self._hash.update(struct.pack("<q", len(data)))
            self._hash.update(data)

    def named(self, name: str, value: object) -> None:
        """A value under the name messages should give it."""
        self.trail.append(name)
        self.value(value)
        self.trail.pop()

    def value(self, value: object) -> None:
        atom = _atom(value)
        if atom is not None:
            self._hash.update(atom)
        elif id(value) in self.path:
            self.put("cycle", str(len(self.path) - self.path.index(id(value))))
        else:
            self.path.append(id(value))
            self._compound(value)
            self.path.pop()

    def _compound(self, value: object) -> None:
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, CodeType):
            self._code(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, ModuleType):
            self._module(value.__name__)
        elif isinstance(value, MethodType):
            self._parts("method", value.__func__, value.__self__)
        elif isinstance(value, BuiltinFunctionType):
            owner = None if isinstance(value.__self__, ModuleType) else value.__self__
            self.put("builtin", _home_of(value.__module__), value.__qualname__)
            self.value(owner)
        elif isinstance(value, functools.partial):
            self._parts("partial", value.func, value.args, value.keywords)
        elif isinstance(value, staticmethod | classmethod):
            self._parts(type(value).__name__, value.__func__)
        elif isinstance(value, property):
            self._parts("property", value.fget, value.fset, value.fdel)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._parts("cached", value.__wrapped__, value.cache_parameters())
        elif isinstance(value, TypeVar | GenericAlias | UnionType) or get_origin(value) is not None:
            self.put("typing", repr(value))
        elif type(value) in (tuple, list):
            assert isinstance(value, tuple | list)
            self._parts(type(value).__name__, *value)
        elif type(value) is dict:
            self._parts("dict", *(part for item in value.items() for part in item))
        elif type(value) in (set, frozenset):
            assert isinstance(value, set | frozenset)
            self.put(type(value).__name__, *sorted(self._alone(member) for member in value))
        else:
            self._data(value)

    def _data(self, value: object) -> None:
        pandas, polars = sys.modules.get("pandas"), sys.modules.get("polars")
        if isinstance(value, enum.Enum):
            self.put("member", value.name)
            self.value(type(value))
        elif isinstance(value, PurePath):
            self.put("path", type(value).__name__, str(value))
        elif isinstance(value, re.Pattern):
            self._parts("pattern", value.pattern, value.flags)
        elif isinstance(value, np.generic) or type(value) in (np.ndarray, np.memmap):
            self._numpy(np.asarray(value))
        elif isinstance(value, np.dtype | np.ufunc):
            self.put("numpy", _home_of("numpy"), repr(value))
        elif isinstance(value, pa.DataType | pa.Field | pa.Schema):
            self.put("arrow type", pa.schema(_fields(value), metadata=getattr(value, "metadata", None)).serialize())
        elif isinstance(value, pa.Scalar):
            self._arrow(pa.table([pa.array([value], value.type)], names=[""]))
        elif isinstance(value, pa.Array | pa.ChunkedArray):
            self._arrow(pa.table([value], names=[""]))
        elif isinstance(value, pa.RecordBatch | pa.Table):
            self._arrow(pa.table(value))
        elif pandas and isinstance(value, pandas.DataFrame):
            self._parts("frame", value.columns, value.index, *(value.iloc[:, at] for at in range(value.shape[1])))
        elif pandas and isinstance(value, pandas.Series):
            self._parts("series", value.name, value.index, _values(value))
        elif pandas and isinstance(value, pandas.Index):
            self._parts("index", list(value.names), _values(value))
        elif polars and isinstance(value, polars.DataFrame):
            self._parts("polars", value.columns, [str(kind) for kind in value.dtypes], value.to_arrow())
        elif polars and isinstance(value, polars.Series):
            self._parts("polars", value.name, str(value.dtype), value.to_arrow())
        else:
            self._object(value)

    def _parts(self, tag: str, *parts: object) -> None:
        self.put(tag, str(len(parts)))
        for part in parts:
            self.value(part)

    def _alone(self, member: object) -> bytes:
        """The digest of one value by itself: what sets are sorted by."""
        if (atom := _atom(member)) is not None:
            return atom
        walk = self.aside()
        walk.value(member)
        return walk.digest()

    def _again(self, key: object, met: object, tag: str) -> bool:
        if key in self.seen:
            self.put("again", str(self.seen[key][0]))
            return True
        self.seen[key] = len(self.seen), met  # held, or another might get its id
        self.put(tag)
        return False

    # Code.

    def _function(self, fn: FunctionType) -> None:
        home = fn.__globals__.get("__name__", "__main__")
        if not _is_local(home) and _reached(home, fn.__qualname__) is fn:
            self.put("installed", _home_of(home), fn.__qualname__)
            return
        if self._again(id(fn), fn, "function"):
            return
        cells = _cells(fn)
        # A module in a closure counts by what is read of it, as a global one does.
        for name, value in cells.items():
            if not isinstance(value, ModuleType):
                self.put("closure", name)
                self.named(f"the closure variable {name!r}", value)
        defaults = fn.__code__.co_varnames[: fn.__code__.co_argcount][-len(fn.__defaults__ or ()) :]
        for name, value in zip(defaults, fn.__defaults__ or (), strict=False):
            self.named(f"the default of {name!r}", value)
        for name, value in sorted((fn.__kwdefaults__ or {}).items()):
            self.put("default", name)
            self.named(f"the default of {name!r}", value)
        for name in sorted(fn.__dict__.keys() - {"__wrapped__"}):  # what is wrapped is in the closure
            self.put("attribute", name)
            self.named(f"the attribute {fn.__name__}.{name}", fn.__dict__[name])
        self._code(fn.__code__)
        for deep, chain in _chains(fn.__code__):
            self._chain(cells if deep else fn.__globals__, chain, deep=deep)
        for name in _imports(fn.__code__, fn.__globals__.get("__package__") or ""):
            self._module(name)

    def _code(self, code: CodeType) -> None:
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self.put("code", code.co_code, code.co_exceptiontable)
        self._parts("shape", shape, names, code.co_consts)

    def _chain(self, scope: Mapping[str, object], chain: tuple[str, ...], *, deep: bool) -> None:
        """A name and the attributes read from it, as far as they lead through modules."""
        name, *rest = chain
        if name in _PLACES:
            return
        if name not in scope:
            self.put("builtin" if hasattr(builtins, name) else "unknown", name)
            return
        value, full = scope[name], name
        if deep and not isinstance(value, ModuleType):
            return
        while isinstance(value, ModuleType) and rest and _is_local(value.__name__) and hasattr(value, rest[0]):
            value, full = getattr(value, rest[0]), f"{full}.{rest.pop(0)}"
        self.put("global", full)
        self.named(f"the global {full!r}", value)

    def _module(self, name: str) -> None:
        """A module as a whole: by version, or by the code of its file."""
        if not _is_local(name):
            self.put("module", _home_of(name), name)
        elif not self._again(name, name, "module"):
            file = _file(name)
            if file is None:
                return
            content = Path(file).read_bytes()
            if not file.endswith(".py"):
                self.put("file", content)
                return
            code = compile(content, "", "exec", dont_inherit=True)
            self._code(code)
            for other in _imports(code, name if _is_package(name) else name.rpartition(".")[0]):
                self._module(other)

    def _class(self, kind: type) -> None:
        if not _is_local(kind.__module__):
            self.put("class", _home_of(kind.__module__), kind.__qualname__)
            return
        if self._again(id(kind), kind, "class"):
            return
        self._parts(kind.__name__, *kind.__bases__)
        members = dict(vars(kind))
        if issubclass(kind, enum.Enum):
            self._parts("members", *((member.name, member.value) for member in kind))
            members = {name: value for name, value in members.items() if _is_code(value)}
        for name in sorted(members.keys() - _CLASS_EXTRAS):
            self.put("attribute", name)
            if not hasattr(members[name], "__objclass__"):  # a slot is its name
                self.named(f"the class attribute {kind.__name__}.{name}", members[name])

    # Data.

    def _numpy(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
        self.put("array", repr(array.dtype), repr(array.shape))
        if array.dtype.hasobject:
            self._parts("objects", *array.ravel().tolist())
        elif array.flags.c_contiguous:
            self._hash.update(array.reshape(-1).view(np.uint8).data)
        else:
            flags = ["external_loop", "buffered", "zerosize_ok"]
            for part in np.nditer(array, flags=flags, order="C", buffersize=_ARROW_ROWS):  # type: ignore[call-overload]
                self._hash.update(np.ascontiguousarray(part).view(np.uint8).data)

    def _arrow(self, table: pa.Table) -> None:
        sink = pa.PythonFile(_Sink(self._hash.update), mode="w")
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=_ARROW_ROWS)

    def _object(self, value: object) -> None:
        if self.reducing:
            self._reduced(value)
            return
        digests = []
        for _ in range(2):  # an object whose state differs from one look to the next has no fingerprint
            walk = self.aside()
            walk.reducing = True
            walk._reduced(value)
            digests.append(walk.digest())
        if digests[0] != digests[1]:
            raise _NoFingerprintError(f"{self._where(value)}, which is not the same from one look to the next")
        self.put("object", digests[0])

    def _reduced(self, value: object) -> None:
        """An object by what it would pickle: how it is made, from what, and its state."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:
            raise _NoFingerprintError(f"{self._where(value)}, which has no fingerprint") from error
        if isinstance(reduced, str):
            self.put("global", _home_of(getattr(value, "__module__", type(value).__module__)), reduced)
            return
        self.put("reduced", str(len(reduced)))
        for part in reduced:
            self.value(list(part) if isinstance(part, Iterator) else part)

    def _where(self, value: object) -> str:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        return f"{self.trail[-1] if self.trail else 'a value'} (type {kind})"


class _Sink:
    """A file that only hashes."""

    closed = False

    def __init__(self, update: Callable[[bytes], object]) -> None:
        self._update = update

    def write(self, data: bytes) -> int:
        self._update(data)
        return len(data)

    def flush(self) -> None:
        """Arrow calls it; there is nothing to flush."""

    def close(self) -> None:
        self.closed = True


def _atom(value: object) -> bytes | None:
    """A plain value as bytes, or None for anything that has parts."""
    kind = type(value)
    if kind is str:
        data = str(value).encode("utf-8", "surrogatepass")
        return b"s%d:" % len(data) + data
    if kind is bytes:
        assert isinstance(value, bytes)
        return b"b%d:" % len(value) + value
    if kind is int:
        assert isinstance(value, int)
        return b"i%x;" % value
    if kind is float:
        return b"f" + struct.pack("<d", value)
    if kind is complex:
        assert isinstance(value, complex)
        return b"c" + struct.pack("<dd", value.real, value.imag)
    if value is None or value is ... or value is NotImplemented or kind is bool:
        return b"n" + repr(value).encode() + b";"
    return None


def _fields(value: pa.DataType | pa.Field | pa.Schema) -> list[pa.Field]:
    if isinstance(value, pa.Schema):
        return list(value)
    return [value if isinstance(value, pa.Field) else pa.field("", value)]


def _values(series: Any) -> object:
    return series.to_numpy() if isinstance(series.dtype, np.dtype) else series.array


def _cells(fn: FunctionType) -> dict[str, object]:
    cells: dict[str, object] = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            cells[name] = None
    return cells


def _is_code(value: object) -> bool:
    return isinstance(value, FunctionType | staticmethod | classmethod | property)


def _chains(code: CodeType) -> list[tuple[bool, tuple[str, ...]]]:
    """The outer names code reads, each with the attributes read from it: (is of the closure, names)."""
    chains: dict[tuple[bool, tuple[str, ...]], None] = {}
    chain: list[str] = []
    deep = False
    for step in [*dis.get_instructions(code), None]:
        if step is not None and step.opname == "EXTENDED_ARG":
            continue
        if step is not None and chain and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(step.argval)
            continue
        if chain:
            chains[deep, tuple(chain)] = None
        chain = []
        if step is not None and step.opname in _OUTER:
            chain, deep = [step.argval], "DEREF" in step.opname
    for inner in _inner(code):
        chains |= dict.fromkeys(_chains(inner))
    return [(deep, names) for deep, names in chains if not deep or names[0] in code.co_freevars]


def _imports(code: CodeType, package: str) -> list[str]:
    """The modules code imports, by full name."""
    found: dict[str, None] = {}
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for at, step in enumerate(steps):
        if step.opname != "IMPORT_NAME":
            continue
        level, names = steps[at - 2].argval, steps[at - 1].argval
        if level and not package:
            continue  # a relative import outside a package fails by itself
        full = importlib.util.resolve_name("." * level + step.argval, package) if level else step.argval
        found[full] = None
        if names and _is_local(full) and _is_package(full):
            found |= dict.fromkeys(f"{full}.{name}" for name in names if _spec(f"{full}.{name}"))
    for inner in _inner(code):
        found |= dict.fromkeys(_imports(inner, package))
    return list(found)


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (value for value in code.co_consts if isinstance(value, CodeType))


def _reached(module: str, name: str) -> object:
    value: object = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


# Where modules come from.


def _file(name: str) -> str | None:
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__file__", None)
    spec = _spec(name)
    return spec.origin if spec is not None and spec.has_location else None


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _is_package(name: str) -> bool:
    spec = _spec(name)
    return spec is not None and spec.submodule_search_locations is not None


def _is_local(name: str) -> bool:
    """Whether a module is the user's own: neither the standard library's nor installed."""
    if name == "__main__":
        return True
    file = _file(name)
    if file is None:
        return name.partition(".")[0] not in sys.stdlib_module_names
    path = Path(file)
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not path.is_relative_to(_STDLIB)


@functools.cache
def _home_of(module: str | None) -> str:
    """The distribution and version a module comes from; the standard library's is Python's."""
    top = (module or "builtins").partition(".")[0]
    if top in sys.stdlib_module_names:
        return _PYTHON
    try:
        return f"{top} {importlib.metadata.version(top)}"
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(top, [])
        return " ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names))) or top
