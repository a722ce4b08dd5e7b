"""What a command that wrote says at the end: a few lines, or the receipt as JSON."""

from __future__ import annotations

import json

from penstock.budget import counted, format_size
from penstock.receipt import Receipt


def report(receipt: Receipt, to: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**receipt.as_json(), "destination": to, "already_done": receipt.already_done}))
        return
    stored = sum(shard["bytes"] for shard in receipt.shards)
    shards = f"{len(receipt.shards):,} shard{'s' if len(receipt.shards) != 1 else ''}"
    if receipt.already_done:
        print(f"already done: {to} holds {shards}, {receipt.rows['written']:,} rows (--restart starts over)")
        return
    memory = receipt.memory
    print(f"wrote {to}: {receipt.rows['written']:,} rows in {shards}, {format_size(stored)}, {receipt.seconds:.1f} s")
    for reason, rows in receipt.rows["dropped"].items():
        print(f"dropped {rows:,} row{'s' if rows != 1 else ''}: {reason}")
    if receipt.rows.get("first_error"):
        print(f"first malformed row: {receipt.rows['first_error']}")
    print(
        f"memory: peak {format_size(memory['measured'])} measured, {format_size(memory['projected'])} projected,"
        f" {format_size(memory['allowed'])} allowed; {memory['workers']} worker{'s' if memory['workers'] != 1 else ''}"
    )


def report_push(receipt: Receipt, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**receipt.as_json(), "already_done": receipt.already_done}))
        return
    published = receipt.published or {}
    stored = sum(shard["bytes"] for shard in receipt.shards)
    rows, shards = counted(receipt.rows["written"], "row"), counted(len(receipt.shards), "shard")
    what = f"{rows} in {shards}, {format_size(stored)}"
    at = f" at {published['revision']}" if published["revision"] else ""
    to = f"{published['to']}{at} ({', '.join(published['splits'])})"
    if receipt.already_done:
        print(f"already there: {to} holds {what} (--restart starts over)")
        return
    commits = f"{counted(published['commits'], 'commit')}, " if published["commits"] else ""
    print(f"published {to}: {what}, {commits}{receipt.seconds:.1f} s")
    for reason, dropped in receipt.rows["dropped"].items():
        print(f"dropped {counted(dropped, 'row')}: {reason}")
    memory = receipt.memory
    print(
        f"memory: peak {format_size(memory['measured'])} measured, {format_size(memory['projected'])} projected,"
        f" {format_size(memory['allowed'])} allowed; disk: {format_size(receipt.disk['measured'])} of scratch"
    )
    revision = f" --revision {published['revision']}" if published["revision"] else ""
    print(f"to check it: penstock verify {published['to']}{revision}")
