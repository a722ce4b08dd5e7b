"""One Hub for all tests of pushing, in a process of its own, and a fresh user of it for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forks import Forks
from hubs import BRIEF, Desk
from hubs import at_hub as at_hub
from penstock.testing import LoopbackHub
from penstock.testing.accounts import TOKENS
from penstock.testing.hub import HubProcess

PARTS = 8 << 20  # what is larger goes in parts; the Hub's own bound is 256 MiB


@pytest.fixture(scope="session")
def the_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    brief = {"name": "brief", "orgs": {"org": "write"}, "role": "write", "expires_after": BRIEF}
    folder = tmp_path_factory.mktemp("hub")
    tokens = {**TOKENS, "hf_brief": brief}
    with LoopbackHub.start_process(folder, tokens=tokens, multipart_over=PARTS, part_size=PARTS // 2) as hub:
        yield hub


@pytest.fixture(scope="session")
def the_forks(the_hub: HubProcess) -> Iterator[Forks]:
    forks = Forks(the_hub.env())
    yield forks
    forks.close()


@pytest.fixture
def desk(the_hub: HubProcess, the_forks: Forks, tmp_path: Path) -> Desk:
    the_hub.set_faults()
    the_hub.clear_log()
    return Desk(the_hub, the_forks, tmp_path)
