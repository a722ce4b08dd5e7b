"""Faults on demand: what goes wrong, for which requests, how often.

Nothing here is left to chance that a second run would not meet again.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ACTIONS = re.compile(r"status:\d{3}|reset|lose_answer|hang:\d+(\.\d+)?")


@dataclass(frozen=True)
class Rule:
    """What happens to the next `times` requests whose "METHOD path?query" matches, after `skip` of them.

    A request meets one rule at most: the first that takes it, and only those after it do not count it.

    Actions: "status:503" (nothing is done; with a Retry-After of `retry_after` seconds if given), "reset" (a TCP reset
    once `after_bytes` of the body were read; nothing is done), "lose_answer" (the work is done, the connection closes
    without an answer), "hang:2.5" (waits so many seconds, then goes on as usual).
    """

    match: str
    action: str
    times: int = 1
    skip: int = 0
    retry_after: float | None = None
    after_bytes: int = 0

    def __post_init__(self) -> None:
        if not _ACTIONS.fullmatch(self.action):
            raise ValueError(f"no such fault: {self.action!r}; choose status:N, reset, lose_answer or hang:SECONDS")
        re.compile(self.match)


@dataclass(frozen=True)
class Faults:
    """`rules` come first; what they leave alone fails at `error_rate` with one of `statuses`, before any work is done.

    Chance depends on the seed, the request and how often it was made, not on the order in which threads arrive: the
    same run meets the same faults again.
    """

    error_rate: float = 0.0
    statuses: tuple[int, ...] = (500,)
    match: str = ""  # only these requests meet chance
    retry_after: float | None = None
    seed: int = 0
    rules: tuple[Rule, ...] = ()

    @staticmethod
    def parse(text: str) -> Faults:
        return Faults.of(json.loads(text))

    @staticmethod
    def of(data: Mapping[str, Any]) -> Faults:
        """From JSON."""
        rules = tuple(Rule(**rule) for rule in data.get("rules", ()))
        return Faults(**{**data, "rules": rules, "statuses": tuple(data.get("statuses", (500,)))})


class Chance:
    """Faults and how far they were used up."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._lock = threading.Lock()
        self._matched = Counter[int]()
        self._seen = Counter[str]()

    def next(self, line: str) -> Rule | None:
        with self._lock:
            for at, rule in enumerate(self.faults.rules):
                if re.search(rule.match, line):
                    self._matched[at] += 1
                    if rule.skip < self._matched[at] <= rule.skip + rule.times:
                        return rule
            if not self.faults.error_rate or not re.search(self.faults.match, line):
                return None
            self._seen[line] += 1
            digest = hashlib.sha256(f"{self.faults.seed} {self._seen[line]} {line}".encode()).digest()
        chance, which = struct.unpack_from("<QQ", digest)
        if chance >= self.faults.error_rate * 2**64:
            return None
        status = self.faults.statuses[which % len(self.faults.statuses)]
        return Rule(line, f"status:{status}", retry_after=self.faults.retry_after)
