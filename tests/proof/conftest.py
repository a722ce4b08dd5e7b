"""Data of full size for the proofs, made once: `PENSTOCK_PROOF_DATA` keeps it, `PENSTOCK_PROOF_SCALE` shrinks it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from limits import kernel_limits_available
from proof.measured import Data

SCALE = float(os.environ.get("PENSTOCK_PROOF_SCALE", "1"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Data]:
    given = os.environ.get("PENSTOCK_PROOF_DATA")
    folder = Path(given).absolute() if given else tmp_path_factory.mktemp("proof-data")
    folder.mkdir(parents=True, exist_ok=True)
    yield Data(folder, SCALE)
    if not given:
        shutil.rmtree(folder)


@pytest.fixture
def work(data: Data, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder on the disk of the data, gone after the test: outputs are as large as inputs."""
    folder = data.folder / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def kernel_limits() -> None:
    """A proof that cannot be held against the kernel is no proof: it fails, where a test would be skipped."""
    reason = kernel_limits_available()
    assert reason is None, reason
