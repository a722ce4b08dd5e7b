"""The command line: what it loads, what it prints, how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as package
from command import PENSTOCK, as_lines, called, make_parquet, ok, penstock, receipt_of, refused

HEAVY = ("torch", "ray", "datasets", "transformers", "pandas", "polars", "duckdb", "pyarrow", "numpy")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "source"
    make_parquet(folder, rows=2_000, files=2, groups=4)
    return folder


def loaded(code: str) -> set[str]:
    """What is imported once some code has run, in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print('\\n' + ' '.join(sys.modules))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stdout.splitlines()[-1].split())


def test_import_loads_nothing_heavy() -> None:
    assert not loaded("import penstock") & set(HEAVY)
    assert "pyarrow" in loaded("import penstock, pyarrow")  # the test can tell


def test_help_loads_nothing_heavy() -> None:
    code = "import penstock.cli.main as m\ntry: m.main(['--help'])\nexcept SystemExit: pass"
    found = loaded(code)
    assert "penstock.cli.convert" in found
    assert not found & set(HEAVY)


def test_reading_does_not_load_what_it_does_not_need(source: Path) -> None:
    found = loaded(f"import penstock as ps; ps.read({str(source)!r}).count(); ps.read({str(source)!r}).head(3)")
    assert "pyarrow" in found
    assert not found & {"torch", "ray", "datasets", "transformers", "polars", "duckdb"}


def test_public_names() -> None:
    assert sorted(package.__all__) == package.__all__
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_help_names_every_command_and_exit_code() -> None:
    said = ok(penstock("--help")).stdout
    for word in ("plan", "show", "count", "convert", "run", "demo", "exit codes", "--memory"):
        assert word in said
    assert "--rewrite" in ok(penstock("convert", "--help")).stdout
    assert package.__version__ in ok(penstock("--version")).stdout


def test_no_command_and_wrong_words(source: Path) -> None:
    assert penstock().returncode == 2
    for words in (("fly",), ("convert",), ("convert", str(source), "out", "--engine", "steam"), ("count", "--fast")):
        ran = penstock(*words)
        assert ran.returncode == 2
        assert "usage: penstock" in ran.stderr


def test_convert_says_what_it_did(source: Path, tmp_path: Path) -> None:
    ran = ok(penstock("convert", source, tmp_path / "out", "--memory", "400MB"))
    assert re.search(r"wrote .*out: 2,000 rows in 1 shard, [\d.]+ kB, [\d.]+ s", ran.stdout)
    assert re.search(r"memory: peak [\d.]+ MB measured, [\d.]+ MB projected, 400 MB allowed; 1 worker", ran.stdout)
    assert ran.stderr == ""
    assert receipt_of(tmp_path / "out")["command"] == (f"penstock convert {source} {tmp_path / 'out'} --memory 400MB")


def test_convert_to_each_format_and_back(source: Path, tmp_path: Path) -> None:
    for format in ("jsonl", "jsonl.zst"):
        out = tmp_path / format
        ok(penstock("convert", source, out, "--format", format, "--memory", "400MB", "--workers", "1"))
        assert [path.name for path in sorted(out.glob("part-*"))] == [f"part-00000-of-00001.{format}"]
        assert ok(called("count", out)).stdout == "2,000\n"


def test_json_prints_one_object_and_nothing_else(source: Path, tmp_path: Path) -> None:
    commands = [
        ("convert", source, tmp_path / "out", "--memory", "400MB"),
        ("convert", source, tmp_path / "out", "--memory", "400MB"),
        ("plan", source, tmp_path / "new", "--memory", "400MB"),
        ("count", source),
        ("show", source),
    ]
    for words in commands:
        ran = ok(penstock(*words, "--json"))
        assert ran.stdout.count("\n") == 1
        assert isinstance(json.loads(ran.stdout), dict)
        assert ran.stderr == ""
    failed = penstock("convert", source, tmp_path / "small", "--memory", "1MB", "--json")
    assert (failed.returncode, failed.json()["exit_code"]) == (3, 3)


def test_json_of_a_write_is_the_receipt(source: Path, tmp_path: Path) -> None:
    said = ok(penstock("convert", source, tmp_path / "out", "--memory", "400MB", "--json")).json()
    stored = receipt_of(tmp_path / "out")
    assert said["destination"] == str(tmp_path / "out")
    assert said["already_done"] is False
    assert {name: said[name] for name in stored} == stored


def test_exit_codes(source: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{\n")
    assert penstock("convert", tmp_path / "bad.jsonl", tmp_path / "bad", "--memory", "400MB").returncode == 1
    assert penstock("convert", source, tmp_path / "other", "--memory", "none").returncode == 2
    assert penstock("convert", source, tmp_path / "small", "--memory", "9MB").returncode == 3
    assert not (tmp_path / "small").exists()


# -- plan -------------------------------------------------------------------------------------------------------------


def test_plan_of_a_splice(source: Path, tmp_path: Path) -> None:
    said = ok(penstock("plan", source, tmp_path / "out", "--memory", "400MB", "--max-shard-size", "100kB", "--json"))
    plan = said.json()
    assert plan["spliced"] is True
    assert plan["why"] == "nothing needs decoding"
    assert (plan["inputs"], plan["formats"], plan["rows"]) == (2, ["parquet"], 2_000)
    assert plan["input_bytes"] == sum(path.stat().st_size for path in source.iterdir())
    assert plan["shards"] > 1
    assert plan["shard_name"] == f"part-00000-of-{plan['shards']:05d}.parquet"
    assert 0 < plan["reserved"] < plan["projected"] <= plan["allowed"] == 400_000_000
    assert plan["disk"] > 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", [("--rewrite",), ()])
def test_plan_is_what_the_run_does(how: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    options = ("--memory=400MB", "--max-shard-size=150kB", "--workers=2", *how)
    words: list[str | Path] = [source, tmp_path / "out", *options]
    plan = ok(penstock("plan", *words, "--json")).json()
    made = ok(penstock("convert", *words, "--json")).json()
    assert len(made["shards"]) / 2 <= plan["shards"] <= len(made["shards"]) * 2  # what decoding gives is an estimate
    assert made["rows"]["written"] == plan["rows"]
    assert made["memory"]["measured"] <= plan["projected"] * 1.05
    assert plan["spliced"] is (not how)


def test_plan_in_words(source: Path, tmp_path: Path) -> None:
    text = ok(penstock("plan", source, tmp_path / "out", "--rewrite", "--memory", "400MB")).stdout
    assert "decoded and encoded: rewrite was asked for" in text
    assert "2 parquet files" in text
    assert "2,000 rows" in text
    assert re.search(r"memory +projected peak [\d.]+ MB of 400 MB allowed: \d workers?, [\d.]+ MB reserved", text)


def test_plan_of_text_says_that_it_is_surveyed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    text = ok(penstock("plan", tmp_path / "a.jsonl", "--memory", "400MB")).stdout
    assert "survey  reads all of it once first" in text


def test_plan_refuses_what_the_run_would(source: Path) -> None:
    refused(penstock("plan", source, "--memory", "5MB"), 3, "the smallest budget that works is --memory")
    refused(penstock("plan", source, source / "out", "--memory", "400MB"), 2, "lies inside the source")


# -- show and count ---------------------------------------------------------------------------------------------------


def test_show(source: Path) -> None:
    text = ok(called("show", source, "-n", "2")).stdout
    assert re.search(r"^id +int64$", text, re.MULTILINE)
    assert re.search(r"^text +string$", text, re.MULTILINE)
    assert "row 0" in text and "row 1" in text and "row 2" not in text
    assert ok(called("show", source, "-n", "0")).stdout.count("\n") == 3
    assert ok(called("show", source, "--columns", "id", "--json", "-n", "1")).json() == {
        "schema": {"id": "int64"},
        "rows": [{"id": 0}],
    }


def test_show_shortens_long_values(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"a": "x" * 5_000}) + "\n")
    assert "characters)" in ok(called("show", tmp_path / "a.jsonl")).stdout
    assert "x" * 5_000 in ok(called("show", tmp_path / "a.jsonl", "--full")).stdout


def test_show_of_what_json_has_no_word_for(tmp_path: Path) -> None:
    import datetime as dt
    from decimal import Decimal

    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {
        "b": b"\xff\x00",
        "t": dt.datetime(2026, 11, 15, 4, 0),
        "d": Decimal("1.50"),
        "n": float("nan"),
        "none": None,
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    text = ok(called("show", tmp_path / "a.parquet")).stdout
    assert "<2 bytes>" in text and "2026-11-15" in text and "1.50" in text
    assert isinstance(ok(called("show", tmp_path / "a.parquet", "--json")).json(), dict)


def test_count(source: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(as_lines(make_parquet(tmp_path / "p", rows=10)))
    assert ok(called("count", source)).stdout == "2,000\n"
    assert ok(called("count", source / "00.parquet", source / "01.parquet")).stdout == "2,000\n"
    assert ok(called("count", f"{source}/*.parquet", "--json")).json() == {"rows": 2_000}
    assert ok(called("count", tmp_path / "a.jsonl")).stdout == "10\n"


def test_reader_of_the_output_that_leaves_early(source: Path) -> None:
    """`penstock show … | head -1` is no error."""
    done = subprocess.run(
        ["sh", "-c", '"$@" | head -1', "sh", *PENSTOCK, "show", str(source), "-n", "2000", "--full"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("id")
    assert done.stderr == ""


def test_progress_on_a_terminal(source: Path, tmp_path: Path) -> None:
    """One live line with measured memory against the budget, wiped at the end."""
    ours, theirs = pty.openpty()
    words = (
        "convert",
        str(source),
        str(tmp_path / "out"),
        "--rewrite",
        "--memory",
        "400MB",
        "--max-shard-size",
        "50kB",
    )
    process = subprocess.Popen([*PENSTOCK, *words], stdout=subprocess.DEVNULL, stderr=theirs, env=dict(os.environ))
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            break
        if not piece:
            break
        seen += piece
    assert process.wait() == 0
    os.close(ours)
    text = seen.decode()
    assert re.search(r"memory [\d.]+ MB of 400 MB", text)
    assert "rows" in text
    assert text.endswith("\r\x1b[K")
