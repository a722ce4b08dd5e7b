"""The demo, small: it kills its own run, goes on, checks what came out, and says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from penstock.demo import MARK


def demo(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", "demo", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_demo_holds_also_in_the_folder_of_an_earlier_one(tmp_path: Path) -> None:
    for name in ("sample", "clean"):
        (tmp_path / "demo-out" / name).mkdir(parents=True)
        (tmp_path / "demo-out" / name / "part-0.parquet").write_text("of an earlier demo")
    (tmp_path / "demo-out" / MARK).touch()
    done = demo(tmp_path, "--size", "20MB")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed when" in done.stdout
    assert "byte for byte" in done.stdout
    assert done.stdout.count("✓") == 5
    left = {path.name for path in (tmp_path / "demo-out").iterdir()}
    assert left >= {"sample", "clean", "again", "resharded", "functions.py", "clean.yaml"}


def test_a_budget_that_is_too_small_fails_the_demo(tmp_path: Path) -> None:
    done = demo(tmp_path, "--size", "10MB", "--memory", "60MB")
    assert done.returncode == 1
    assert "smallest budget that works" in done.stderr


def test_the_demo_leaves_a_folder_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sample").write_text("mine")
    done = demo(tmp_path, "--to", "mine")
    assert done.returncode == 2
    assert (tmp_path / "mine" / "sample").read_text() == "mine"
