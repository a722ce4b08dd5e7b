"""A fingerprint changes with what a function does, and with nothing else."""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock.errors import UsageError
from penstock.functions import describe, fingerprint

SOURCE = Path(importlib.import_module("penstock.functions").__file__ or "").parents[1]

JOB = """
import enum
import re
from dataclasses import dataclass, field
from pathlib import Path
import helpers

STOP = {"the", "a", "of"}
KINDS = {"x": frozenset({("p", 1), ("q", 2)})}
LIMIT = 3

class Color(enum.Enum):
    RED = 1
    BLUE = 2

@dataclass
class Options:
    words: set = field(default_factory=lambda: {"u", "v"})
    color: Color = Color.RED

OPTIONS = Options()

def inner(text):
    return [word for word in text.split() if word not in STOP and word not in {"x", "y", "z"}]

def clean(row, *, pattern=re.compile("a+"), root=Path("/data")):
    def keep(word):
        return len(word) > LIMIT or word in KINDS["x"]
    return helpers.lower([word for word in inner(row) if keep(word)]), OPTIONS
"""
HELPERS = """
FOLD = True

def lower(words):
    return [word.casefold() if FOLD else word for word in words]

def unused():
    return 1
"""


def printed(folder: Path, job: str = JOB, helpers: str = HELPERS, *, seed: str = "0", module: str = "job") -> str:
    """The fingerprint of `clean` in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(job)
    (folder / "helpers.py").write_text(helpers)
    code = f"import {module}; from penstock.functions import fingerprint; print(fingerprint({module}.clean))"
    environment = {
        **os.environ,
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": f"{folder}:{SOURCE}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return printed(tmp_path_factory.mktemp("base"))


def test_it_is_a_digest(base: str) -> None:
    assert re.fullmatch("[0-9a-f]{64}", base)


@pytest.mark.parametrize("seed", ["1", "2", "77"])
def test_hash_seeds_do_not_count(seed: str, base: str, tmp_path: Path) -> None:
    assert printed(tmp_path, seed=seed) == base


def test_lines_files_and_neighbours_do_not_count(base: str, tmp_path: Path) -> None:
    moved = '"""A job."""\n\nimport sys\n# A comment.\n' + JOB + "\n\ndef other():\n    return sys\n"
    assert printed(tmp_path / "elsewhere", moved, "\n\n" + HELPERS.replace("return 1", "return 2")) == base
    assert printed(tmp_path / "renamed", module="task") == base


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("job", "len(word) > LIMIT", "len(word) >= LIMIT"),
        ("job", "LIMIT = 3", "LIMIT = 4"),
        ("job", '"the", "a"', '"the", "an"'),
        ("job", '("q", 2)', '("q", 3)'),
        ("job", '{"x", "y", "z"}', '{"x", "y", "w"}'),
        ("job", '"a+"', '"b+"'),
        ("job", '"/data"', '"/date"'),
        ("job", "text.split()", 'text.split(" ")'),
        ("job", "RED = 1", "RED = 5"),
        ("job", "= Color.RED", "= Color.BLUE"),
        ("helpers", "FOLD = True", "FOLD = False"),
        ("helpers", "casefold", "lower"),
    ],
)
def test_what_it_reads_and_calls_counts(file: str, old: str, new: str, base: str, tmp_path: Path) -> None:
    job, helpers = (JOB.replace(old, new), HELPERS) if file == "job" else (JOB, HELPERS.replace(old, new))
    assert (job, helpers) != (JOB, HELPERS)
    assert printed(tmp_path, job, helpers) != base


LOCAL = """
def clean(row):
    import json
    from package import part
    from package.other import thing
    return json.dumps(part.go(row)), thing
"""


def test_imports_inside_a_function_count_by_their_files(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("thing = 1")
    (package / "deep.py").write_text("DEEP = 1")
    (package / "part.py").write_text("from .deep import DEEP\ndef go(row):\n    return row\n")
    first = printed(tmp_path, LOCAL)
    (package / "part.py").write_text("# moved\nfrom .deep import DEEP\ndef go(row):\n    return row\n")
    assert printed(tmp_path, LOCAL) == first
    (package / "deep.py").write_text("DEEP = 2")
    second = printed(tmp_path, LOCAL)
    (package / "other.py").write_text("thing = 2")
    assert len({first, second, printed(tmp_path, LOCAL)}) == 3


def test_installed_code_counts_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = importlib.import_module("penstock.functions")
    before = fingerprint(lambda x: np.add(pc.add(x, 1), 1))
    functions._home_of.cache_clear()
    version = importlib.import_module("importlib.metadata").version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99" if name == "numpy" else version(name))
    after = fingerprint(lambda x: np.add(pc.add(x, 1), 1))
    functions._home_of.cache_clear()
    assert before != after


# Values, by way of a closure.


def holding(value: object) -> Callable[[], object]:
    return lambda: value


def printed_value(value: object) -> str:
    return fingerprint(holding(value))


class Point:
    __slots__ = ("x",)

    def __init__(self, x: object) -> None:
        self.x = x

    def __call__(self, y: object) -> tuple[object, object]:
        return self.x, y

    def method(self) -> object:
        return self.x


class Plain:
    def __init__(self, **state: object) -> None:
        self.__dict__.update(state)


def add(x: int, y: int) -> int:
    return x + y


VALUES: list[Callable[[], tuple[object, object]]] = [
    lambda: (1, 2),
    lambda: (1, True),
    lambda: (1, 1.0),
    lambda: (0.0, -0.0),
    lambda: ("a", b"a"),
    lambda: (10**5000, 10**5000 + 1),
    lambda: (("a", "bc"), ("ab", "c")),
    lambda: ([1, [2]], [[1], 2]),
    lambda: ([1], (1,)),
    lambda: ({"a": 1}, {"a": 2}),
    lambda: ({1, 2}, {1, 3}),
    lambda: ({1, 2}, frozenset({1, 2})),
    lambda: (np.arange(6), np.arange(6).astype("i4")),
    lambda: (np.arange(6), np.arange(6).reshape(2, 3)),
    lambda: (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(3, 2)),
    lambda: (np.float32(1), np.float32(2)),
    lambda: (np.array(["a", None], object), np.array(["b", None], object)),
    lambda: (np.ma.masked_array([1, 2], [False, True]), np.ma.masked_array([1, 2], [True, False])),
    lambda: (pa.array([1, 2]), pa.array([1, None])),
    lambda: (pa.scalar(1), pa.scalar(1, pa.int8())),
    lambda: (pa.table({"a": [1]}), pa.table({"b": [1]})),
    lambda: (pa.schema([("a", pa.int8())]), pa.schema([("a", pa.int16())])),
    lambda: (pa.int8(), pa.int16()),
    lambda: (pd.DataFrame({"a": [1], "s": ["x"]}), pd.DataFrame({"a": [1], "s": ["y"]})),
    lambda: (pd.Series([1], index=[1]), pd.Series([1], index=[2])),
    lambda: (pl.DataFrame({"a": [1]}), pl.DataFrame({"a": [2]})),
    lambda: (Path("a"), Path("b")),
    lambda: (re.compile("a"), re.compile("a", re.IGNORECASE)),
    lambda: (functools.partial(add, 1), functools.partial(add, 2)),
    lambda: (functools.partial(add, y=1), functools.partial(add, x=1)),
    lambda: (Point(1), Point(2)),
    lambda: (Point(1).method, Point(2).method),
    lambda: (Plain(a=1), Plain(a=2)),
    lambda: (len, max),
    lambda: ("a".join, "b".join),
    lambda: (os.path, os),
    lambda: (range(3), range(4)),
]


@pytest.mark.parametrize("pair", VALUES, ids=lambda pair: type(pair()[0]).__name__)
def test_values_count_by_content(pair: Callable[[], tuple[object, object]]) -> None:
    (one, other), (same, _) = pair(), pair()
    assert printed_value(one) == printed_value(same)
    assert printed_value(one) != printed_value(other)


def test_layout_of_arrays_does_not_count() -> None:
    square = np.arange(90_000).reshape(300, 300)
    assert printed_value(np.asfortranarray(square)) == printed_value(square)
    assert printed_value(pa.array([0, 1, 2]).slice(1)) == printed_value(pa.array([1, 2]))


def test_sharing_and_interning_do_not_count() -> None:
    word = "".join(["long", " word"])
    assert printed_value([word, word]) == printed_value([word, "".join(["long", " word"])])


def test_a_large_array_is_not_copied() -> None:
    array = np.ones(32 << 20, dtype=np.uint8)
    tracemalloc.start()
    printed_value([array, array.reshape(2, -1).T])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


# Cycles.


def even(n: int) -> bool:
    return n == 0 or odd(n - 1)


def odd(n: int) -> bool:
    return n != 0 and even(n - 1)


def test_cycles_end() -> None:
    ring: list[object] = [1]
    ring.append(ring)
    knot = Plain()
    knot.__dict__["me"] = {"again": [knot]}
    holder = Plain()
    holder.__dict__["items"] = {holder}
    assert fingerprint(even) == fingerprint(even) != fingerprint(odd)
    assert printed_value(ring) == printed_value(ring) != printed_value([1, [1]])
    assert printed_value(knot) == printed_value(knot)
    assert printed_value(holder) == printed_value(holder)


def test_wrapped_functions_count_by_what_they_wrap() -> None:
    cached = functools.lru_cache(add)
    assert fingerprint(cached) == fingerprint(functools.lru_cache(add)) != fingerprint(functools.lru_cache(even))


def test_running_a_function_does_not_count() -> None:
    before = fingerprint(even)
    for _ in range(100):  # enough for the interpreter to specialise its bytecode
        even(20)
    assert fingerprint(even) == before


# Values that have no fingerprint.

LOCK = threading.Lock()
DO = "pass it as a plain value, or give the step a version= of your own"


class Fickle:
    looks = 0

    def __getstate__(self) -> object:
        Fickle.looks += 1
        return {"looks": Fickle.looks}


def uses_lock() -> object:
    return LOCK


def refusal(fn: Callable[..., object]) -> str:
    with pytest.raises(UsageError) as caught:
        fingerprint(fn)
    return str(caught.value)


def test_what_cannot_be_told_is_named() -> None:
    lock, fickle = threading.Lock(), Fickle()
    assert refusal(lambda: uses_lock()).endswith(
        f"uses the global 'LOCK' (type _thread.lock), which has no fingerprint; {DO}"
    )
    assert refusal(lambda: [lock]).endswith(
        f"uses the closure variable 'lock' (type _thread.lock), which has no fingerprint; {DO}"
    )

    def with_default(row: object, *, by: object = lock) -> object:
        return row, by

    assert refusal(with_default) == (
        f"with_default ({__name__}) uses the default of 'by' (type _thread.lock), which has no fingerprint; {DO}"
    )
    assert refusal(lambda: fickle).endswith(
        f"uses the closure variable 'fickle' (type {__name__}.Fickle), "
        f"which is not the same from one look to the next; {DO}"
    )


# Names for messages.


def test_descriptions() -> None:
    assert describe(add) == f"add ({__name__})"
    assert describe(functools.partial(add, 1)) == f"add ({__name__})"
    assert describe(Point(1)) == f"Point ({__name__})"
    assert describe(Point(1).method) == f"Point.method ({__name__})"
    assert describe(len) == "len (builtins)"
    assert re.fullmatch(r"<lambda> \(line \d+ of test_functions.py\)", describe(lambda: 1))


def test_a_script_is_named_by_its_lines() -> None:
    scope: dict[str, Callable[..., object]] = {}
    code = textwrap.dedent("""
        __name__ = "__main__"
        def clean(row):
            return row
    """)
    exec(compile(code, "/home/someone/job.py", "exec"), scope)
    assert describe(scope["clean"]) == "clean (line 3 of job.py)"
