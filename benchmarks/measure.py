"""Measures commands side by side: seconds, seconds until the data is on disk, and peak anonymous memory of the tree.

`compare` runs its cases in turn (A B C, A B C, ...), so that a slow minute of the machine falls on all of them.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.02
TIE = 1.3  # seconds move by 20 % and more from run to run on a shared machine
PACKAGES = ("datasets", "duckdb", "numpy", "polars", "pyarrow")


@dataclass(frozen=True)
class Case:
    """One way of doing the work. The command writes to `output`, which `check` looks at and which is then removed."""

    name: str
    command: Sequence[str]
    output: Path
    check: Callable[[Path], str | None]  # what is wrong with the output, if anything
    ours: bool = False


@dataclass(frozen=True)
class Run:
    """One run of one case: `synced` is `seconds` and the time `os.sync()` took after it."""

    seconds: float
    synced: float
    peak: int
    output_bytes: int
    error: str | None = None


@dataclass(frozen=True)
class Outcome:
    """All runs of one case."""

    case: Case
    runs: tuple[Run, ...]

    @property
    def error(self) -> str | None:
        return next((run.error for run in self.runs if run.error), None)

    def median(self, figure: Callable[[Run], float]) -> float:
        return statistics.median(map(figure, self.runs))


def in_fresh_process(function: Callable[..., object], *args: object) -> list[str]:
    """The command that calls a module-level function with `args` as strings, in a new interpreter."""
    return [sys.executable, __file__, function.__code__.co_filename, function.__name__, *map(str, args)]


def measure(command: Sequence[str]) -> Run:
    """Run a command to its end. What it prints is shown only if it fails, as the run's error."""
    # What earlier work left to be written would otherwise be charged to this run.
    os.sync()
    with tempfile.TemporaryFile() as said:
        started = time.monotonic()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
        peak = 0
        while True:
            peak = max(peak, sum(map(_anonymous, _tree(process.pid))))
            try:
                returncode = process.wait(SAMPLE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        seconds = time.monotonic() - started
        os.sync()
        synced = time.monotonic() - started
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
    error = f"exit {returncode}: {lines[-1]}" if returncode else None
    return Run(seconds, synced, peak, 0, error)


def compare(
    cases: Sequence[Case],
    *,
    title: str,
    repeat: int = 3,
    before_each: Callable[[], object] = lambda: None,
    markdown: Path | None = None,
) -> list[Outcome]:
    """Run all cases `repeat` times in turn and print every figure, failures too; also as Markdown to a file."""
    runs: dict[str, list[Run]] = {case.name: [] for case in cases}
    for turn in range(1, repeat + 1):
        for case in cases:
            before_each()
            run = _run_case(case)
            runs[case.name].append(run)
            print(f"{turn}/{repeat} {case.name}: {run.error or _figures(run)}", file=sys.stderr, flush=True)
    outcomes = [Outcome(case, tuple(runs[case.name])) for case in cases]
    report = _report(title, repeat, outcomes)
    print(report)
    if markdown:
        markdown.write_text(report)
    return outcomes


def files_of(folder: Path) -> list[Path]:
    """The data files under a folder or file; what lies in hidden folders is bookkeeping."""
    found = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
    return [path for path in found if path.is_file() and not _hidden(path.relative_to(folder))]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _run_case(case: Case) -> Run:
    _remove(case.output)
    try:
        run = measure(case.command)
        if run.error:
            return run
        size = sum(path.stat().st_size for path in files_of(case.output))
        return Run(run.seconds, run.synced, run.peak, size, case.check(case.output))
    finally:
        _remove(case.output)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _tree(pid: int) -> Iterator[int]:
    """A process and its descendants; one that ends while we look is left out."""
    yield pid
    for thread in _listed(Path(f"/proc/{pid}/task")):
        for child in _read(thread / "children").split():
            yield from _tree(int(child))


def _anonymous(pid: int) -> int:
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _report(title: str, repeat: int, outcomes: Sequence[Outcome]) -> str:
    rows = [["", "seconds", "and on disk", "MB", "output MB"]]
    rows += [[outcome.case.name, *_cells(outcome)] for outcome in outcomes]
    text = [f"## {title}", "", _machine(), "", f"Medians of {repeat}, the lowest and highest in brackets.", ""]
    text += [_table(rows), ""]
    ours = [outcome for outcome in outcomes if outcome.case.ours and not outcome.error]
    if ours:
        against = [["times ours", *(outcome.case.name for outcome in ours)]]
        against += [[other.case.name, *(_verdict(other, own) for own in ours)] for other in outcomes]
        text += [f"How many times as much each takes as ours; under {TIE} times either way is a tie.", ""]
        text += [_table(against), ""]
    failures = [f"- {outcome.case.name}: {outcome.error}" for outcome in outcomes if outcome.error]
    text += ["Failed:", "", *failures, ""] if failures else []
    return "\n".join(text)


def _cells(outcome: Outcome) -> list[str]:
    if outcome.error:
        failed = sum(run.error is not None for run in outcome.runs)
        return [f"failed {failed} of {len(outcome.runs)}", "", "", ""]
    figures: list[tuple[Callable[[Run], float], int]] = [
        (lambda run: run.seconds, 1),
        (lambda run: run.synced, 1),
        (lambda run: run.peak / 1e6, 0),
        (lambda run: run.output_bytes / 1e6, 0),
    ]
    cells = []
    for figure, digits in figures:
        low, high = min(map(figure, outcome.runs)), max(map(figure, outcome.runs))
        cells.append(f"{outcome.median(figure):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})")
    return cells


def _verdict(other: Outcome, own: Outcome) -> str:
    if other is own or other.error or own.error:
        return ""
    figures: dict[str, Callable[[Run], float]] = {
        "time": lambda run: run.seconds,
        "on disk": lambda run: run.synced,
        "memory": lambda run: run.peak,
    }
    ratios = {name: other.median(figure) / own.median(figure) for name, figure in figures.items()}
    return ", ".join(f"{name} {_word(ratio)}" for name, ratio in ratios.items())


def _word(ratio: float) -> str:
    verdict = "win" if ratio >= TIE else "loss" if ratio <= 1 / TIE else "tie"
    return f"{ratio:.2f} ({verdict})"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _figures(run: Run) -> str:
    return f"{run.seconds:.1f} s, {run.synced:.1f} s on disk, {run.peak / 1e6:,.0f} MB"


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return f"{cores} cores, {memory:.0f} GiB, Python {platform.python_version()}; {versions}."


def _main() -> None:
    file, name, *args = sys.argv[1:]
    runpy.run_path(file)[name](*args)


if __name__ == "__main__":
    _main()
