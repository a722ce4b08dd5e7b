"""A push: content first, invisible; then commits, the last of which makes all of it visible at once.

What happens at each crash point is decided here. Content counts when the journal says that it was sent; names are made
from digests, so the same content always has the same name; and a commit is looked for before it is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import memory, receipt
from penstock.budget import Budget
from penstock.chains import Chain, Write, key_of
from penstock.engines.local import CALLERS_IMPORTS
from penstock.journal import LOCK, Journal, clear, held, records
from penstock.media.read import BIDS_FOLDER
from penstock.media.spool import state_home
from penstock.meter import Meter, Watcher
from penstock.publish.card import Card
from penstock.publish.place import Place, Sealed, Sent, Streams, Wish
from penstock.publish.plan import PushPlan, SplitPlan, plan_push, plan_words
from penstock.publish.seed import bids_seed, seeded_body
from penstock.publish.send import Item, Sender, file_item, sealed_at, shard_item
from penstock.publish.shards import Form, Recipe, token_of
from penstock.receipt import Receipt
from penstock.run import Settings, added_up

if TYPE_CHECKING:
    from penstock.explain import Explained
    from penstock.publish.build import Built

# What hashing and sending take beside an interpreter, its imports and the plan: buffers, connections, one row group of
# references at a time.
SENDING = 40 << 20


def push(
    splits: Mapping[str, Sequence[Chain]],
    place: Place,
    *,
    wish: Wish,
    write: Write,
    settings: Settings,
    watch: Watcher,
) -> Receipt:
    """Publish splits as one transaction. Same plan unfinished: go on. Already there: say so."""
    look = place.check(_sources(splits))
    plan = plan_push(splits, write)
    description = {"push": {**place.describe(), **wish.describe()}, "splits": plan.describe()}
    key = key_of(description)
    state = state_folder(place, wish)
    meter = Meter(settings.budget.allowed, watch)
    meter.projected = projected_peak(settings.budget)
    with held(state):
        if settings.restart:
            place.discard(records(state))
            clear(state)
        elif (found := _already_done(state, place, key)) is not None:
            return found
        with Journal(state, plan=description, key=key) as journal, _gauge(meter) as gauge:
            place.prepare(look, journal)
            with place.at_work():
                sent, streams, built = _send_all(plan, place, wish, journal, meter, settings, state)
                meter.begin_bytes("commit", total=0, tasks=0)
                shown = place.publish(sent, wish, journal, streams, _fresh_card(plan, place, wish))
            made = _receipt(plan, description, key, settings, meter, gauge, sent, built, wish)
            made = replace(
                made, published={**_where(place, wish, sent), "commit": shown.commit, "commits": shown.commits}
            )
            made.save(state)
        _clean(state)
        return made


def dry_run(
    splits: Mapping[str, Sequence[Chain]], place: Place, *, wish: Wish, write: Write, settings: Settings
) -> tuple[str, dict[str, Any]]:
    """What a push would do and take, in words and in figures, having opened what must be opened and sent nothing."""
    look = place.check(_sources(splits))
    plan = plan_push(splits, write)
    projected = projected_peak(settings.budget)
    state = place.state(look)
    beside = sum(one.bytes for split in plan.splits for one in split.beside)
    built = _foreseen(plan, write, settings)
    projected = max([projected, *(made.projected for made in built.values())])
    staged = sum(made.stored for made in built.values())
    disk = staged if settings.disk is None else min(staged, settings.disk)
    text = plan_words(
        plan,
        built=built,
        target=place.address(),
        state=state,
        visible=place.visible,
        projected=projected,
        allowed=settings.budget.allowed,
        disk=disk,
        beside_bytes=beside,
    )
    figures = {
        "to": place.name,
        "exists": look.exists,
        "private": "private" in state,
        "rows": {split.name: split.rows for split in plan.splits},
        "bytes": {split.name: split.bytes for split in plan.splits},
        "shards": {
            split.name: built[split.name].shards if split.form is None else len(split.recipes) for split in plan.splits
        },
        "largest_row": {split.name: split.largest_row for split in plan.splits},
        "beside": sum(len(split.beside) for split in plan.splits),
        "memory": {"allowed": settings.budget.allowed, "projected": projected},
        "disk": disk,
        "commits": 0 if place.visible else plan.commits(sum(made.shards for made in built.values())),
    }
    return text, figures


def _foreseen(plan: PushPlan, write: Write, settings: Settings) -> dict[str, Explained]:
    """Splits that must be built, and what that takes."""
    if all(split.form is not None for split in plan.splits):
        return {}
    from penstock.publish.build import foreseen

    return {split.name: foreseen(split, write, settings) for split in plan.splits if split.form is None}


def _sources(splits: Mapping[str, Sequence[Chain]]) -> list[str]:
    reads = [chain.read for chains in splits.values() for chain in chains]
    return [*(file.path for read in reads for file in read.files), *(one for read in reads for one in read.folders)]


def state_folder(place: Place, wish: Wish) -> Path:
    """Where the journal of a push lies: one for each repository, revision and config."""
    where = place.describe()
    about = json.dumps([where["at"], where["to"], where.get("revision"), wish.config_name])
    name = re.sub(r"[^\w.-]+", "--", place.name).strip("-")[-80:]
    return state_home() / "push" / f"{name}-{hashlib.sha256(about.encode()).hexdigest()[:12]}"


def projected_peak(budget: Budget) -> int:
    """What hashing and sending will take at most, refused where it does not fit."""
    needed = min(memory.anonymous(), CALLERS_IMPORTS) + SENDING
    budget.check(needed, what="hashing and sending shards")
    return needed


def _already_done(state: Path, place: Place, key: str) -> Receipt | None:
    """The receipt of this same push, its content still there. Any other push takes its place: names are digests."""
    found = receipt.load(state)
    if found is None or found.published is None or found.plan_key != key:
        return None
    there = place.holds([Sealed(shard["path"], shard["sha256"], shard["bytes"]) for shard in found.shards])
    return replace(found, already_done=True) if there else None


# -- content ----------------------------------------------------------------------------------------------------------


def _send_all(
    plan: PushPlan, place: Place, wish: Wish, journal: Journal, meter: Meter, settings: Settings, state: Path
) -> tuple[list[Sent], Streams, list[Built]]:
    """Everything hashed and sent, nothing visible; and what had to be built for it."""
    _forget_what_is_gone(place, journal)
    total = plan.bytes + sum(one.bytes for split in plan.splits for one in split.beside)
    meter.begin_bytes("send", total=total, tasks=plan.files)
    sender = Sender(
        place,
        journal,
        folder=wish.folder(),
        stopped=place.stopped,
        on_sent=meter.thing_done,
        on_bytes=meter.bytes_passed,
    )
    items: list[Item] = []

    def give(item: Item) -> None:
        items.append(item)
        sender.give(item)
        sender.check()

    try:
        made: list[tuple[SplitPlan, Form, Sequence[Recipe]]] = []
        built: list[Built] = []
        for split in plan.splits:
            beside = [file_item(one.path, one.file, one.bytes, one.modified) for one in split.beside]
            items += beside
            sender.give_all(beside)
            if split.form is None:
                from penstock.publish.build import build

                built.append(build(split, plan.write, give, sender.check, journal, meter, settings, state))
                made.append((split, built[-1].form, built[-1].recipes))
                continue
            for recipe in split.recipes:
                give(shard_item(split.name, split.form, recipe))
            made.append((split, split.form, split.recipes))
        sender.finish()
    except BaseException:
        sender.stop()
        raise
    streams = {
        journal.records[f"task/hashed/{item.key}"]["sha256"]: _opener(item)
        for item in items
        if journal.records[f"task/sent/{item.key}"]["mode"] == "regular"
    }
    return [_sent(split, form, recipes, journal, wish, place) for split, form, recipes in made], streams, built


def _opener(item: Item) -> Callable[[], BufferedIOBase]:
    return lambda: item.open(False)


def _forget_what_is_gone(place: Place, journal: Journal) -> None:
    """A place may drop content that nothing came to name: what it no longer has is sent again."""
    keys = [key for key in journal.records if key.startswith("task/sent/")]
    known = [sealed_at(journal, key.removeprefix("task/sent/"))[0] for key in keys]
    for key, there in zip(keys, place.present(known), strict=True):
        if not there:
            del journal.records[key]


def _sent(split: SplitPlan, form: Form, recipes: Sequence[Recipe], journal: Journal, wish: Wish, place: Place) -> Sent:
    keys = [f"{split.name}/{recipe.at:06d}" for recipe in recipes]
    token = token_of(journal.records[f"task/hashed/{key}"]["sha256"] for key in keys)
    folder = f"{wish.folder()}/{split.name}-{token}"
    found = []
    for at, key in enumerate(keys):
        early = place.shard_path(wish.folder(), split.name, at, journal.records[f"task/hashed/{key}"]["sha256"])
        found.append(sealed_at(journal, key, early or f"{folder}/{at:05d}-of-{len(keys):05d}.parquet"))
    return Sent(
        name=split.name,
        folder=folder,
        shards=tuple(sealed for sealed, _ in found),
        rows=tuple(recipe.rows for recipe in recipes),
        stretches=tuple(hashed["stretch"] for _, hashed in found),
        beside=tuple(sealed_at(journal, f"beside/{one.path}", one.path)[0] for one in split.beside),
        features=form.features,
        bytes=sum(recipe.bytes for recipe in recipes),
        inputs=tuple(
            {"path": file.name, **({} if file.by_content else {"bytes": file.bytes})}
            for chain in split.chains
            for file in chain.read.files
        ),
    )


def _fresh_card(plan: PushPlan, place: Place, wish: Wish) -> Card:
    """The card of a repository that has none; that of a BIDS tree from its own description."""
    beside = {one.path: one.file for split in plan.splits for one in split.beside}
    if (about := beside.get(f"{BIDS_FOLDER}/dataset_description.json")) is not None:
        texts = [_read_text(beside.get(f"{BIDS_FOLDER}/{name}")) for name in ("README", "CHANGES")]
        texts[0] = texts[0] or _read_text(beside.get(f"{BIDS_FOLDER}/README.md"))
        try:
            stated = json.loads(_read_text(about) or "{}")
        except ValueError:
            stated = {}
        if isinstance(stated, dict):
            return bids_seed(stated, texts[0], texts[1], repo_id=place.title)
    return Card(body=seeded_body(place.title, config_name=wish.config_name))


def _read_text(path: str | None) -> str | None:
    if path is None:
        return None
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read(1 << 20)


# -- what it took -----------------------------------------------------------------------------------------------------


@dataclass
class Gauge:
    """What the kernel says the push took."""

    reserved: int  # an interpreter and its imports, before anything is sent
    measured: int = 0


@contextmanager
def _gauge(meter: Meter) -> Iterator[Gauge]:
    """Sample this process and what it has started, for the progress line and the receipt."""
    # Law 1 covers what Penstock takes, not what a notebook held before.
    before = memory.anonymous()
    heap = max(0, before - CALLERS_IMPORTS)
    gauge, done, own = Gauge(before - heap), threading.Event(), os.getpid()

    def sample() -> None:
        while not done.wait(0.05):
            tree = memory.anonymous() - heap + sum(memory.anonymous(child) for child in memory.children(own))
            gauge.measured = max(gauge.measured, tree)
            meter.sampled(tree)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield gauge
    finally:
        done.set()
        thread.join()


def _where(place: Place, wish: Wish, sent: Sequence[Sent]) -> dict[str, Any]:
    return {
        "to": place.name,
        "revision": place.describe().get("revision"),
        "config": wish.config_name,
        "splits": [one.name for one in sent],
    }


def _receipt(
    plan: PushPlan,
    description: dict[str, Any],
    key: str,
    settings: Settings,
    meter: Meter,
    gauge: Gauge,
    sent: Sequence[Sent],
    built: Sequence[Built],
    wish: Wish,
) -> Receipt:
    shards = [shard for one in sent for shard in one.published(wish)["shards"]]
    written = sum(shard["rows"] for shard in shards)
    as_they_were = written - sum(recipe.rows for one in built for recipe in one.recipes)
    return Receipt(
        command=settings.command,
        plan=description,
        plan_key=key,
        inputs=plan.inputs(),
        rows={
            "read": as_they_were + sum(one.read for one in built),
            "written": written,
            "dropped": added_up(one.dropped for one in built),
            "first_error": None,
        },
        shards=shards,
        memory={
            "allowed": settings.budget.allowed,
            "reserved": gauge.reserved,
            "projected": meter.projected,
            "measured": gauge.measured,
            "workers": max((one.workers for one in built), default=0),
            "trace": meter.trace.as_json(),
        },
        disk={"projected": meter.disk_projected, "measured": meter.disk_measured},
        tasks={"planned": meter.planned, "run": meter.run},
        seconds=round(meter.seconds(), 3),
        versions=receipt.versions(),
    )


def _clean(state: Path) -> None:
    """The receipt is there: everything that was only needed while running goes."""
    for entry in state.iterdir():
        if entry.name not in (receipt.NAME, LOCK):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
