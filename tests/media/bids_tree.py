"""A synthetic BIDS tree with what real ones have: runs, echoes, field maps, companions at every level, derivatives.

Any number of subjects and sessions; files are small and random, sparse, or empty. `annexed` turns scans into links into
an annex, `lost` takes the content of some away.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from hashlib import md5
from pathlib import Path

import numpy as np


@dataclass
class Maker:
    root: Path
    size: int
    rng: np.random.Generator

    def text(self, path: str, text: str) -> None:
        self.data(path, text.encode())

    def data(self, path: str, data: bytes) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def scan(self, path: str, *, sidecar: dict[str, object] | None = None) -> None:
        """A scan of about `size` bytes, no two alike."""
        size = 0 if not self.size else int(self.rng.integers(self.size // 2, self.size * 2))
        if size > 1 << 20:  # sparse, its first bytes its own
            self.data(path, self.rng.bytes(64))
            os.truncate(self.root / path, size)
        else:
            self.data(path, self.rng.bytes(size))
        if sidecar is not None:
            self.text(path.split(".")[0] + ".json", json.dumps(sidecar, indent=2, ensure_ascii=False) + "\n")


def make_bids(
    root: Path, *, subjects: int = 3, sessions: int = 2, runs: int = 2, size: int = 600, seed: int = 0
) -> Path:
    """A tree of `subjects` with `sessions` each; the last subject has no session folders if there is more than one."""
    make = Maker(root, size, np.random.default_rng(seed))
    _root_files(make, subjects)
    for number in range(1, subjects + 1):
        label = f"sub-{number:04d}"
        if number == subjects > 1:
            _session(make, label, label, number, runs=runs)
            make.scan(f"derivatives/lesions/{label}/anat/{label}_label-lesion_mask.nii.gz")
            continue
        make.text(
            f"{label}/{label}_sessions.tsv",
            "session_id\tacq_time\tscore\tage\n"
            + "".join(f"ses-{one}\t2020-01-0{one % 9 + 1}\t{one}.5\t{40 + one}\n" for one in range(1, sessions + 1)),
        )
        make.text(f"{label}/{label}_task-rest_bold.json", json.dumps({"Manufacturer": f"of {label}"}))
        for one in range(1, sessions + 1):
            _session(make, f"{label}/ses-{one}", f"{label}_ses-{one}", number + one, runs=runs)
        # Derived once for a subject, but for the first, whose sessions have one each.
        if number == 1:
            for one in range(1, sessions + 1):
                name = f"{label}/ses-{one}/anat/{label}_ses-{one}"
                make.scan(f"derivatives/lesions/{name}_space-T1w_label-lesion_mask.nii.gz", sidecar={"Type": "ROI"})
    return root


def _root_files(make: Maker, subjects: int) -> None:
    make.text(
        "dataset_description.json",
        json.dumps({"Name": "Synthetic scans", "BIDSVersion": "1.10.0", "License": "CC0", "Authors": ["A. Writer"]}),
    )
    make.text("README", "A tree made up for tests.\n")
    make.text("CHANGES", "1.0.0 2024-01-01\n  - First.\n")
    make.text("LICENSE", "CC0\n")
    make.text(".bidsignore", "*_scratch.*\nextra/\n")
    make.text("extra/notes.txt", "nobody's\n")
    make.text("sub-0001/sub-0001_scratch.txt", "nor this\n")
    make.text("code/convert.py", "print('converted')\n")
    make.data("code/deep/empty.txt", b"")
    make.text("phenotype/moca.tsv", "participant_id\tmoca\nsub-0001\t29\n")
    make.text("task-rest_bold.json", json.dumps({"RepetitionTime": 2.0, "TaskName": "rest"}))
    make.text("dwi.bval", "0 1000\n")
    make.text("participants.json", "{}")
    make.text(
        "participants.tsv",
        "participant_id\tage\tsex\tweight\tcode\tbold\n"
        + "".join(
            f"sub-{one:04d}\t{20 + one}\t{'n/a' if one == 1 else 'F'}\t{60 + one}.5\t{one:03d}\tyes\n"
            for one in range(1, subjects + 1)
        ),
    )
    make.text("derivatives/lesions/dataset_description.json", json.dumps({"Name": "Lesions"}))
    make.text("derivatives/fmriprep/sub-0001/report.html", "<p>left out</p>")


def _session(make: Maker, folder: str, stem: str, number: int, *, runs: int) -> None:
    """One session: two T1w, T2w, FLAIR, BOLD of two tasks with events, echoes and physiology, DWI both ways, a field
    map, and the list of its scans."""
    anat, func, dwi, fmap = (f"{folder}/{name}/{stem}" for name in ("anat", "func", "dwi", "fmap"))
    make.scan(f"{anat}_run-1_T1w.nii.gz", sidecar={"EchoTime": 0.003})
    make.scan(f"{anat}_run-2_T1w.nii.gz", sidecar={"EchoTime": 0.004})
    make.scan(f"{anat}_T2w.nii.gz", sidecar={"Note": "naïve µ"})
    if number % 2:
        make.scan(f"{anat}_acq-3d_FLAIR.nii.gz")
    for run in range(1, runs + 1):
        make.scan(f"{func}_task-rest_run-{run:02d}_bold.nii.gz", sidecar={"FlipAngle": 70 + run})
        make.data(f"{func}_task-rest_run-{run:02d}_recording-pulse_physio.tsv.gz", make.rng.bytes(40))
        make.text(f"{func}_task-rest_run-{run:02d}_recording-pulse_physio.json", '{"StartTime": 0}')
        for echo in (1, 2):
            make.scan(f"{func}_task-nback_run-{run:02d}_echo-{echo}_bold.nii.gz", sidecar={"EchoTime": echo / 100})
        make.scan(f"{func}_task-nback_run-{run:02d}_echo-1_sbref.nii.gz")
        make.text(f"{func}_task-nback_run-{run:02d}_events.tsv", f"onset\tduration\n{run}.0\t1\n")
    make.scan(f"{func}_task-tap_bold.nii.gz")
    make.text(f"{func}_task-tap_events.tsv", "onset\tduration\r\n0.0\tn/a\r\n")
    make.data(f"{func}_task-tap_stim.bin", b"\xff\xfe")
    for way in ("AP", "PA"):
        make.scan(f"{dwi}_dir-{way}_dwi.nii.gz", sidecar={"PhaseEncodingDirection": way})
        make.text(f"{dwi}_dir-{way}_dwi.bvec", "0 1\n0 0\n0 0\n")
        if way == "AP":
            make.text(f"{dwi}_dir-{way}_dwi.bval", "0 800\n")
    make.scan(f"{dwi}_dir-AP_sbref.nii.gz")
    for name in ("phasediff", "magnitude1", "magnitude2"):
        make.scan(f"{fmap}_{name}.nii.gz", sidecar={"IntendedFor": name})
    make.data(f"{fmap}_magnitude2.json", b'{"Latin": "\xe9"}')  # not UTF-8
    make.text(f"{folder}/{stem}_scans.tsv", "filename\tacq_time\n")
    make.data(f"{folder}/anat/defaced.txt", b"")


def annexed(root: Path, *, lost: int = 0, pattern: str = "sub-*/**/*.nii.gz") -> list[Path]:
    """Turn scans into links into an annex, as DataLad leaves them; the content of the first `lost` is taken away."""
    (root / ".datalad").mkdir()
    (root / ".datalad" / "config").write_text("")
    links = sorted(root.glob(pattern))
    for at, link in enumerate(links):
        data = link.read_bytes()
        key = f"MD5E-s{len(data)}--{md5(data).hexdigest()}.nii.gz"
        place = root / ".git" / "annex" / "objects" / "a1" / "b2" / key / key
        link.unlink()
        link.symlink_to(os.path.relpath(place, link.parent))
        if at >= lost:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
    (root / ".git").mkdir(exist_ok=True)
    return links[:lost]


def unlocked(root: Path, link: Path) -> None:
    """Leave an annex pointer in the place of one file."""
    data = link.read_bytes()
    link.write_text(f"/annex/objects/MD5E-s{len(data)}--{md5(data).hexdigest()}.nii.gz\n")


def files_of(root: Path) -> dict[str, bytes]:
    """Every file of a tree that is the dataset's, by its path."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not {".git", ".datalad", ".penstock"} & set(path.relative_to(root).parts)
    }
