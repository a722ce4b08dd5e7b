"""Measures commands side by side: seconds, seconds until the data is on disk, peak anonymous memory of the tree, and
the peak of what lies in a folder for scratch.

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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

SAMPLE_SECONDS = 0.02
TIE = 1.3  # seconds move by 20 % and more from run to run on a shared machine
PACKAGES = ("datasets", "duckdb", "huggingface_hub", "numpy", "polars", "pyarrow")


@dataclass(frozen=True)
class Case:
    """One way of doing the work. The command writes to `output`, which `check` looks at and which is then removed."""

    name: str
    command: Sequence[str]
    output: Path
    check: Callable[[Path], str | None]  # what is wrong with the output, if anything
    ours: bool = False
    bound: bool = False  # no tool, but the least any of them must do
    scratch: Path | None = None  # where the command puts what it does not keep
    # what has to run beside the command, such as a server; it gives the command's environment
    beside: Callable[[], AbstractContextManager[Mapping[str, str]]] = lambda: nullcontext(os.environ)


@dataclass(frozen=True)
class Run:
    """One run of one case: `synced` is `seconds` and the time `os.sync()` took after it."""

    seconds: float
    synced: float
    peak: int
    scratch: int = 0
    output_bytes: int = 0
    error: str | None = None


# What can be shown of a run: its column, the word for it in a comparison ("" for none), the figure, its digits.
FIGURES: dict[str, tuple[str, Callable[[Run], float], int]] = {
    "seconds": ("time", lambda run: run.seconds, 1),
    "and on disk": ("on disk", lambda run: run.synced, 1),
    "MB": ("memory", lambda run: run.peak / 1e6, 0),
    "scratch MB": ("", lambda run: run.scratch / 1e6, 1),
    "output MB": ("", lambda run: run.output_bytes / 1e6, 0),
}
OF_FILES = ("seconds", "and on disk", "MB", "output MB")
UNTIL_IT_FAILED = ("MB", "scratch MB")


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


def measure(command: Sequence[str], *, env: Mapping[str, str] | None = None, scratch: Path | None = None) -> Run:
    """Run a command to its end. What it prints is shown only if it fails, as the run's error."""
    # What earlier work left to be written would otherwise be charged to this run.
    os.sync()
    with tempfile.TemporaryFile() as said, watched(scratch) as highest:
        started = time.monotonic()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=env)
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
    return Run(seconds, synced, peak, highest(), error=error)


@contextmanager
def watched(folder: Path | None) -> Iterator[Callable[[], int]]:
    """Look at what lies in a folder until the block ends; call what is given for the most that was seen, in bytes."""
    most, done = [0], threading.Event()

    def look() -> None:
        while folder is not None and not done.wait(SAMPLE_SECONDS):
            most[0] = max(most[0], bytes_in(folder))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: most[0]
    finally:
        done.set()
        thread.join()


def bytes_in(folder: Path) -> int:
    """Of all files; one that goes while we look is left out."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name), follow_symlinks=False).st_size
            except OSError:
                continue
    return total


def compare(
    cases: Sequence[Case],
    *,
    title: str,
    repeat: int = 3,
    before_each: Callable[[], object] = lambda: None,
    figures: Sequence[str] = OF_FILES,
    markdown: Path | None = None,
) -> list[Outcome]:
    """Run all cases `repeat` times in turn and print these figures, failures too; also as Markdown to a file."""
    runs: dict[str, list[Run]] = {case.name: [] for case in cases}
    for turn in range(1, repeat + 1):
        for case in cases:
            before_each()
            run = _run_case(case)
            runs[case.name].append(run)
            print(f"{turn}/{repeat} {case.name}: {run.error or _figures(run, figures)}", file=sys.stderr, flush=True)
    outcomes = [Outcome(case, tuple(runs[case.name])) for case in cases]
    report = _report(title, repeat, outcomes, figures)
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
        with case.beside() as env:
            run = measure(case.command, env=env, scratch=case.scratch)
        if run.error:
            return run
        size = sum(path.stat().st_size for path in files_of(case.output))
        return replace(run, output_bytes=size, error=case.check(case.output))
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


def _report(title: str, repeat: int, outcomes: Sequence[Outcome], figures: Sequence[str]) -> str:
    rows = [["", *figures]]
    rows += [[outcome.case.name, *_cells(outcome, figures)] for outcome in outcomes]
    text = [f"## {title}", "", machine(), "", f"Medians of {repeat}, the lowest and highest in brackets.", ""]
    text += [table(rows), ""]
    bounds = [outcome for outcome in outcomes if outcome.case.bound and not outcome.error]
    tools = [outcome for outcome in outcomes if not outcome.case.bound]
    ours = [outcome for outcome in tools if outcome.case.ours and not outcome.error]
    if bounds:
        above = [["times its seconds", *(outcome.case.name for outcome in bounds)]]
        above += [[tool.case.name, *(_times(tool, bound) for bound in bounds)] for tool in tools]
        text += ["How many times as long each takes as the least there is to do.", "", table(above), ""]
    if ours:
        against = [["times ours", *(outcome.case.name for outcome in ours)]]
        against += [[other.case.name, *(_verdict(other, own, figures) for own in ours)] for other in tools]
        text += [f"How many times as much each takes as ours; under {TIE} times either way is a tie.", ""]
        text += [table(against), ""]
    failures = [f"- {outcome.case.name}: {outcome.error}" for outcome in outcomes if outcome.error]
    text += ["Failed:", "", *failures, ""] if failures else []
    return "\n".join(text)


def _cells(outcome: Outcome, figures: Sequence[str]) -> list[str]:
    failed = sum(run.error is not None for run in outcome.runs)
    cells = []
    for at, name in enumerate(figures):
        _, figure, digits = FIGURES[name]
        low, high = min(map(figure, outcome.runs)), max(map(figure, outcome.runs))
        shown = f"{outcome.median(figure):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"
        cells.append(shown if not failed or name in UNTIL_IT_FAILED else "")
        if failed and at == 0:
            cells[0] = f"failed {failed} of {len(outcome.runs)}"
    return cells


def _times(tool: Outcome, bound: Outcome) -> str:
    return "" if tool.error else f"{tool.median(_seconds) / bound.median(_seconds):.2f}"


def _seconds(run: Run) -> float:
    return run.seconds


def _verdict(other: Outcome, own: Outcome, figures: Sequence[str]) -> str:
    if other is own or other.error or own.error:
        return ""
    ratios = {}
    for word, figure, _ in (FIGURES[name] for name in figures):
        if word:
            ratios[word] = other.median(figure) / own.median(figure)
    return ", ".join(f"{word} {_word(ratio)}" for word, ratio in ratios.items())


def _word(ratio: float) -> str:
    verdict = "win" if ratio >= TIE else "loss" if ratio <= 1 / TIE else "tie"
    return f"{ratio:.2f} ({verdict})"


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _figures(run: Run, figures: Sequence[str]) -> str:
    shown = ((name, *FIGURES[name][1:]) for name in figures)
    return ", ".join(f"{name} {figure(run):,.{digits}f}" for name, figure, digits in shown)


def machine() -> str:
    """What the figures were seen on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return f"{cores} cores, {memory:.0f} GiB, Python {platform.python_version()}; {versions}."


def _main() -> None:
    file, name, *args = sys.argv[1:]
    runpy.run_path(file)[name](*args)


if __name__ == "__main__":
    _main()
