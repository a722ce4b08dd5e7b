"""The docs hold what they say: every command and Python block runs, links lead somewhere, the reference is complete.

`python tests/test_docs.py` puts the help texts of all commands into docs/reference/cli.md.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.cli.main import COMMANDS, _parser
from penstock.pipeline import _READERS, _WORDS, _WRITERS
from penstock.steps import STEPS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = ROOT / "docs" / "reference"
CLI = REFERENCE / "cli.md"

_COMMENT = re.compile(r"\s*<!-- (\w+): (.+) -->\s*")
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_HELP = re.compile(r"(<!-- help: (\w+) -->\n```text\n)(.*?)(```\n)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block, and what the comment before it tells the test."""

    page: Path
    line: int
    language: str
    text: str
    note: str = ""
    value: str = ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    at, note, value = 0, "", ""
    while at < len(lines):
        line = lines[at]
        at += 1
        if match := _COMMENT.fullmatch(line):
            note, value = match.groups()
        elif line.lstrip().startswith("```"):
            first, language = at, line.strip(" `")
            while not lines[at].lstrip().startswith("```"):
                at += 1
            yield Block(page, first, language, "\n".join(lines[first:at]) + "\n", note, value)
            at, note, value = at + 1, "", ""
        elif line.strip():
            note, value = "", ""


def runnable(page: Path) -> list[Block]:
    return [
        block
        for block in blocks(page)
        if block.note == "file" or (block.language in ("console", "python") and block.note != "skip")
    ]


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the docs presume: `corpus/` in Parquet and `logs/` in JSON lines, with `id`, `text` and `score`."""
    folder = tmp_path_factory.mktemp("docs")
    random = np.random.default_rng(0)
    words = np.array(["of", "water", "gate", "pipe", "turbine", "river", "the", "a", "and", "flows"], dtype=object)
    for name in ("corpus", "logs"):
        (folder / name).mkdir()
    for part in range(3):
        texts = [" ".join(random.choice(words, size)) for size in random.integers(10, 120, 4_000)]
        table = pa.table({"id": np.arange(4_000) + part * 4_000, "text": texts, "score": random.random(4_000)})
        pq.write_table(table, folder / "corpus" / f"part-{part}.parquet", row_group_size=1_000)
        lines = "".join(json.dumps(row) + "\n" for row in table.slice(0, 1_000).to_pylist())
        (folder / "logs" / f"part-{part}.jsonl").write_text(lines)
    return folder


@pytest.mark.parametrize(
    "page", [page for page in PAGES if runnable(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_block_runs(page: Path, sample: Path, tmp_path: Path) -> None:
    """From top to bottom, in one folder, as a reader would."""
    for name in ("corpus", "logs"):
        shutil.copytree(sample / name, tmp_path / name)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    for block in runnable(page):
        if block.note == "file":
            (tmp_path / block.value).write_text(block.text)
            continue
        commands = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
        if block.language == "python":
            (tmp_path / "block.py").write_text(block.text)
            commands = ["python block.py"]
        assert commands, f"{block.place} has no line that starts with `$ `"
        for command in commands:
            codes = block.value.split(" or ") if block.note == "exit" and command == commands[-1] else ["0"]
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            code = done.returncode if done.returncode >= 0 else 128 - done.returncode
            assert str(code) in codes, f"{block.place}: {command} ended with {code}\n{done.stdout}{done.stderr}"


def test_comments_are_known() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.note in ("", "skip", "file", "exit", "help"), block.place


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page.name} links to {link}"
        assert target.is_relative_to(ROOT)
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.name == "index.md" or page.relative_to(ROOT / "docs").as_posix() in index


def parser_of(command: str) -> argparse.ArgumentParser:
    for action in _parser([])._actions:
        if isinstance(action, argparse._SubParsersAction):
            found: argparse.ArgumentParser = action.choices[command]
            return found
    raise AssertionError("there are no commands")


def help_of(command: str) -> str:
    width, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "100"
    try:
        return parser_of(command).format_help()
    finally:
        os.environ.pop("COLUMNS") if width is None else os.environ.update(COLUMNS=width)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_is_documented(command: str) -> None:
    texts = {name: text for _, name, text, _ in _HELP.findall(CLI.read_text())}
    for action in parser_of(command)._actions:
        for word in action.option_strings:
            assert word in texts[command]
    if sys.version_info < (3, 13):  # which lays out help in another way
        assert texts[command] == help_of(command), "run `python tests/test_docs.py` to refresh docs/reference/cli.md"


def test_the_python_api_is_documented() -> None:
    text = (REFERENCE / "python.md").read_text()
    for name in ps.__all__:
        assert f"ps.{name}" in text
    for name, member in inspect.getmembers(ps.Dataset):
        if name.startswith("_"):
            continue
        assert f"`{name}" in text or f".{name}" in text, name
        for parameter in inspect.signature(member).parameters if callable(member) else ():
            assert parameter in ("self", "options") or re.search(rf"\b{parameter}\b", text), (name, parameter)


def test_the_pipeline_words_are_documented() -> None:
    text = (REFERENCE / "pipeline.md").read_text()
    for word in (*_WORDS, *(w for of in (*_READERS.values(), *_WRITERS.values()) for w in of), *STEPS):
        assert f"`{word}`" in text, word


def test_the_receipt_is_documented(sample: Path, tmp_path: Path) -> None:
    text = (REFERENCE / "receipt.md").read_text()
    receipt = ps.read(sample / "corpus").write(tmp_path / "out", memory="400MB").as_json()
    assert {field.name for field in fields(ps.Receipt)} == {*receipt, "already_done"}
    for name, value in receipt.items():
        nested = isinstance(value, dict) and name not in ("plan", "versions")
        for word in [f"{name}.{below}" for below in value] if nested else [name]:
            assert f"`{word}`" in text, word
    for name in {**receipt["shards"][0], **receipt["inputs"][0]}:
        assert f"`{name}`" in text, name


def test_the_errors_are_documented() -> None:
    text = (REFERENCE / "errors.md").read_text()
    for name, kind in inspect.getmembers(ps.errors, inspect.isclass):
        if issubclass(kind, ps.errors.PenstockError):
            assert f"| `{name}` | {kind.exit_code} |" in text, name


if __name__ == "__main__":
    CLI.write_text(_HELP.sub(lambda found: found[1] + help_of(found[2]) + found[4], CLI.read_text()))
