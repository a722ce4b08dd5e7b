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
from hubs import nifti, png
from penstock import testing
from penstock.cli.main import COMMANDS, _parser
from penstock.media.kinds import KINDS
from penstock.pipeline import _READERS, _WORDS, _WRITERS
from penstock.steps import STEPS
from penstock.testing import LoopbackHub, LoopbackS3

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
    """What the docs presume: `corpus/` in Parquet and `logs/` in JSON lines, with `id`, `text` and `score`; a table
    `scans.csv` of the files in `scans/`; `photos/` in folders by class; `study/`, a BIDS tree."""
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
    scans = [nifti(folder / "scans" / f"sub-{number:02d}_T1w.nii.gz", seed=number, side=24) for number in range(1, 7)]
    rows = [f"{number:02d},{20 + number},{scan.relative_to(folder)}\n" for number, scan in enumerate(scans, 1)]
    (folder / "scans.csv").write_text("".join(["subject,age,t1w\n", *rows]))
    for number in range(6):
        png(folder / "photos" / ("dog", "cat")[number % 2] / f"{number}.png", seed=number)
    _make_study(folder / "study")
    return folder


def _make_study(root: Path) -> None:
    """Two subjects, two sessions, an anatomical scan and two runs of rest in each; masks among the derivatives."""
    texts = {
        "dataset_description.json": json.dumps({"Name": "Study", "BIDSVersion": "1.10.0", "License": "CC0"}),
        "README": "Two subjects, two sessions.\n",
        "participants.tsv": "participant_id\tage\tsex\nsub-01\t31\tF\nsub-02\t40\tM\n",
        "task-rest_bold.json": json.dumps({"RepetitionTime": 2.0}),
    }
    scans = []
    for subject in ("sub-01", "sub-02"):
        for session in ("ses-1", "ses-2"):
            base, name = f"{subject}/{session}", f"{subject}_{session}"
            scans.append(f"{base}/anat/{name}_T1w.nii.gz")
            for run in (f"{base}/func/{name}_task-rest_run-{number}_" for number in (1, 2)):
                scans.append(f"{run}bold.nii.gz")
                texts |= {f"{run}bold.json": '{"EchoTime": 0.03}', f"{run}events.tsv": "onset\tduration\n1\t2\n"}
            scans.append(f"derivatives/lesions/{base}/anat/{name}_label-lesion_mask.nii.gz")
    for seed, path in enumerate(scans):
        nifti(root / path, seed=100 + seed, side=8)
    for path, text in texts.items():
        (root / path).write_text(text)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if runnable(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_block_runs(page: Path, sample: Path, tmp_path: Path) -> None:
    """From top to bottom, in one folder, as a reader would. The Hub and the store are on this machine."""
    here = tmp_path / "here"
    shutil.copytree(sample, here)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["PENSTOCK_STATE"] = str(tmp_path / "state")
    (tmp_path / "store" / "buckets" / "bucket").mkdir(parents=True)
    with LoopbackHub(tmp_path / "hub") as hub, LoopbackS3(tmp_path / "store") as store:
        _run_blocks(page, here, {**environment, **hub.env(), **store.env()})


def _run_blocks(page: Path, here: Path, environment: dict[str, str]) -> None:
    for block in runnable(page):
        if block.note == "file":
            (here / block.value).write_text(block.text)
            continue
        commands = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
        if block.language == "python":
            (here / "block.py").write_text(block.text)
            commands = ["python block.py"]
        assert commands, f"{block.place} has no line that starts with `$ `"
        for command in commands:
            codes = block.value.split(" or ") if block.note == "exit" and command == commands[-1] else ["0"]
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=here, env=environment, capture_output=True, text=True, timeout=60, check=False,
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
    members = {f"ps.{name}": getattr(ps, name) for name in ps.__all__}
    members |= {f".{name}": member for name, member in inspect.getmembers(ps.Dataset) if not name.startswith("_")}
    for name, member in members.items():
        assert name in text or f"`{name[1:]}" in text, name
        for parameter in inspect.signature(member).parameters if inspect.isfunction(member) else ():
            assert parameter in ("self", "options") or re.search(rf"\b{parameter}\b", text), (name, parameter)


def test_the_testing_api_is_documented() -> None:
    text = (REFERENCE / "testing.md").read_text()
    for name in testing.__all__:
        assert f"`{name}" in text, name
        for parameter in inspect.signature(getattr(testing, name)).parameters:
            assert f"`{parameter}" in text, (name, parameter)


def test_the_kinds_of_media_are_documented() -> None:
    text = (REFERENCE / "media.md").read_text()
    for kind, feature in KINDS.items():
        assert f"| `{kind}` | `{feature or 'binary'}`" in text, kind


def test_the_pipeline_words_are_documented() -> None:
    text = (REFERENCE / "pipeline.md").read_text()
    for word in (*_WORDS, *(w for of in (*_READERS.values(), *_WRITERS.values()) for w in of), *STEPS):
        assert f"`{word}`" in text, word


def test_the_receipt_is_documented(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_STATE", str(tmp_path / "state"))
    text = (REFERENCE / "receipt.md").read_text()
    receipt = ps.push(ps.read(sample / "corpus"), tmp_path / "out", memory="400MB").as_json()
    assert {field.name for field in fields(ps.Receipt)} == {*receipt, "already_done"}
    for name, value in receipt.items():
        nested = isinstance(value, dict) and name not in ("plan", "versions")
        for word in [f"{name}.{below}" for below in value] if nested else [name]:
            assert f"`{word}`" in text, word
    travels = json.loads((tmp_path / "out" / ".penstock" / "default" / "train.json").read_text())
    for name in {**receipt["shards"][0], **receipt["inputs"][0], **travels, **travels["shards"][0]["sample"]}:
        assert f"`{name}`" in text, name


def test_the_errors_are_documented() -> None:
    text = (REFERENCE / "errors.md").read_text()
    for name, kind in inspect.getmembers(ps.errors, inspect.isclass):
        if issubclass(kind, ps.errors.PenstockError):
            assert f"| `{name}` | {kind.exit_code} |" in text, name


if __name__ == "__main__":
    CLI.write_text(_HELP.sub(lambda found: found[1] + help_of(found[2]) + found[4], CLI.read_text()))
