"""A rehearsal: the whole push against a Hub on this machine, loaded back, verified, reported. Nothing leaves it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.budget import counted, format_size
from penstock.chains import Chain, Write
from penstock.errors import DiskFull
from penstock.meter import Watcher
from penstock.publish.hub import HubPlace
from penstock.publish.place import Wish
from penstock.publish.plan import plan_push
from penstock.publish.push import push
from penstock.receipt import Receipt
from penstock.run import Settings

TOKEN = "hf_rehearsal"
# Read as a stream, undecoded: how many rows, and which features, a user of the dataset would find.
_LOAD = """
import json, sys
from datasets import load_dataset
name, config, splits = sys.argv[1], sys.argv[2], sys.argv[3:]
found = {}
for split in splits:
    rows = load_dataset(name, config, split=split, streaming=True).decode(False)
    found[split] = {"rows": sum(1 for _ in rows), "features": str(rows.features)}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Rehearsal:
    """What was seen: the push's receipt, what `verify` found, and what `load_dataset` gave, where it is installed."""

    receipt: Receipt
    verified: dict[str, Any]
    loaded: dict[str, Any] | None
    failed: str  # what did not hold; nothing where all did

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "receipt": self.receipt.as_json()}

    def text(self) -> str:
        published, memory = self.receipt.published or {}, self.receipt.memory
        stored = sum(shard["bytes"] for shard in self.receipt.shards)
        rows, shards = counted(self.receipt.rows["written"], "row"), counted(len(self.receipt.shards), "shard")
        commits = counted(published["commits"], "commit")
        lines = [
            ("pushed", f"{rows} in {shards}, {format_size(stored)}, {commits}, {self.receipt.seconds:.1f} s"),
            ("memory", f"peak {format_size(memory['measured'])} measured, {format_size(memory['projected'])} projected,"
                       f" {format_size(memory['allowed'])} allowed"),
            ("verified", f"{counted(self.verified['files'], 'file')}, sizes and SHA-256"),
            ("loaded", "datasets is not installed, so it was not tried" if self.loaded is None else
             "; ".join(f"{split}: {counted(found['rows'], 'row')}" for split, found in self.loaded.items())),
            ("verdict", self.failed or "the same command without --rehearse will do this"),
        ]  # fmt: skip
        return "\n".join(f"{word:<9}{what}" for word, what in lines)


def rehearse(
    splits: Mapping[str, Sequence[Chain]],
    to: str,
    *,
    wish: Wish,
    write: Write,
    settings: Settings,
    private: bool | None,
    watch: Watcher,
) -> Rehearsal:
    """Push to a Hub that is started for it in a folder of scratch, and gone afterwards."""
    from penstock.publish.verify import verify
    from penstock.testing import LoopbackHub

    base = settings.scratch or Path(tempfile.gettempdir())
    base.mkdir(parents=True, exist_ok=True)
    needed, free = plan_push(splits, write).bytes, shutil.disk_usage(base).free
    if needed > free:
        raise DiskFull(
            f"a rehearsal keeps the whole dataset once, {format_size(needed)}, and {format_size(free)} is free",
            where=str(base),
            do="name a larger disk with --scratch, or rehearse with a part of it",
        )
    owner = to.partition("/")[0]
    tokens = {TOKEN: {"name": owner, "orgs": {}, "role": "write"}}
    with tempfile.TemporaryDirectory(prefix="penstock-rehearsal-", dir=base) as folder:
        before = os.environ.get("PENSTOCK_STATE")
        os.environ["PENSTOCK_STATE"] = str(Path(folder) / "state")  # a real push under way keeps its journal
        try:
            with LoopbackHub.start_process(Path(folder) / "hub", tokens=tokens) as hub:
                place = HubPlace(to, token=TOKEN, private=private, endpoint=hub.url)
                receipt = push(splits, place, wish=wish, write=write, settings=settings, watch=watch)
                verified = verify(to, token=TOKEN, endpoint=hub.url).as_json()
                loaded = _load(to, wish.config_name, list(splits), {**os.environ, **hub.env(token=TOKEN)})
        finally:
            os.environ.pop("PENSTOCK_STATE")
            if before is not None:
                os.environ["PENSTOCK_STATE"] = before
    return Rehearsal(receipt, verified, loaded, _what_failed(receipt, verified, loaded))


def _load(to: str, config: str, splits: Sequence[str], env: Mapping[str, str]) -> dict[str, Any] | None:
    if find_spec("datasets") is None:
        return None
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, to, config, *splits], env=dict(env), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {split: {"rows": 0, "features": "", "error": last} for split in splits}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _what_failed(receipt: Receipt, verified: Mapping[str, Any], loaded: Mapping[str, Any] | None) -> str:
    if verified.get("problems"):
        return f"verify found {len(verified['problems'])} problems, the first: {verified['problems'][0]}"
    for split, found in (loaded or {}).items():
        if "error" in found:
            return f"load_dataset failed on {split}: {found['error']}"
    if loaded is not None and sum(found["rows"] for found in loaded.values()) != receipt.rows["written"]:
        return "load_dataset gave another number of rows than were pushed"
    return ""
