"""What a fresh card says: what the dataset is, how to load it, how to check it. Its author writes the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.publish.card import DEFAULT, Card

# The Hub's names for licences of data, by what is left of a licence's name without its decorations.
_LICENSES = {
    **{name: name for name in ("pddl", "odbl", "odc-by", "mit", "unlicense", "gfdl", "wtfpl", "apache-2.0")},
    **{name: name for name in ("bsd-2-clause", "bsd-3-clause", "gpl-2.0", "gpl-3.0", "lgpl-3.0", "agpl-3.0")},
    **{f"cc-by-{version}": f"cc-by-{version}" for version in ("2.0", "2.5", "3.0", "4.0")},
    **{f"cc-by-sa-{version}": f"cc-by-sa-{version}" for version in ("3.0", "4.0")},
    **{f"cc-by-nc-{version}": f"cc-by-nc-{version}" for version in ("2.0", "3.0", "4.0")},
    **{f"cc-by-nc-sa-{version}": f"cc-by-nc-sa-{version}" for version in ("2.0", "3.0", "4.0")},
    **{f"cc-by-nc-nd-{version}": f"cc-by-nc-nd-{version}" for version in ("3.0", "4.0")},
    "cc-by-nd-4.0": "cc-by-nd-4.0",
    "cc0": "cc0-1.0",
    "cc0-1.0": "cc0-1.0",
    "cc-zero": "cc0-1.0",
    "odbl-1.0": "odbl",
    "odc-by-1.0": "odc-by",
    "odc-odbl": "odbl",
    "odc-pddl": "pddl",
    "pddl-1.0": "pddl",
    "apache-2": "apache-2.0",
}  # fmt: skip


def seeded_body(
    repo_id: str, *, title: str | None = None, about: Sequence[str] = (), config_name: str = DEFAULT
) -> str:
    """The text of a card for a dataset that has none.

    >>> print(seeded_body("org/name", about=["Words by the million."]).splitlines()[3])
    Words by the million.
    """
    config = "" if config_name == DEFAULT else f', "{config_name}"'
    lines = [
        "",
        f"# {_one_line(title or repo_id.rpartition('/')[2])}",
        "",
        *(about if not about else [*about, ""]),
        "## Load",
        "",
        "```python",
        "from datasets import load_dataset",
        "",
        f'dataset = load_dataset("{repo_id}"{config})',
        "```",
        "",
        "## Verify",
        "",
        "Published with Penstock. The receipt in `.penstock/` has the size and SHA-256 of every file; this compares",
        "them with what is here, and reads samples back:",
        "",
        "```sh",
        f"penstock verify {repo_id}",
        "```",
        "",
    ]
    return "\n".join(lines)


def bids_seed(
    description: Mapping[str, Any], readme: str | None = None, changes: str | None = None, *, repo_id: str
) -> Card:
    """A card from the root files of a BIDS tree. A licence becomes a key only where the Hub has a name for it."""
    name = _one_line(description.get("Name") or repo_id.rpartition("/")[2])
    data: dict[str, Any] = {"pretty_name": name}
    stated = _one_line(description.get("License") or "")
    if (license := license_id(stated)) is not None:
        data["license"] = license
    facts = {
        "Authors": ", ".join(_one_line(one) for one in _listed(description.get("Authors"))),
        "License": stated,
        "DOI": _doi(description.get("DatasetDOI")),
        "BIDS version": _one_line(description.get("BIDSVersion") or ""),
    }
    about = [f"- {label}: {fact}" for label, fact in facts.items() if fact]
    if readme and readme.strip():
        about += ["", readme.replace("\r\n", "\n").strip()]
    if changes and changes.strip():
        text = changes.replace("\r\n", "\n").strip()
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        about += ["", "## Changes", "", f"{fence}text", text, fence]
    return Card(data, seeded_body(repo_id, title=name, about=about))


def license_id(stated: str) -> str | None:
    """The Hub's name for a licence, if it has one for exactly this.

    >>> license_id("CC BY-SA 4.0"), license_id("Creative Commons Zero (CC0)"), license_id("ask the authors")
    ('cc-by-sa-4.0', 'cc0-1.0', None)
    """
    text = stated.lower()
    if (inside := re.search(r"\(([^()]+)\)\s*$", text)) is not None:
        text = inside[1]
    words = re.sub(r"\b(the|license|licence|version|public domain dedication|international|unported)\b", " ", text)
    words = re.sub(r"\bv(?=\d)", "", words)
    words = words.replace("creative commons", "cc").replace("attribution", "by").replace("noncommercial", "nc")
    words = words.replace("non-commercial", "nc").replace("sharealike", "sa").replace("noderivatives", "nd")
    return _LICENSES.get("-".join(re.findall(r"[a-z0-9]+(?:\.[0-9]+)*", words)))


def _doi(stated: object) -> str:
    text = _one_line(stated or "")
    found = re.fullmatch(r"(?:https?://(?:dx\.)?doi\.org/|doi:\s*)?(10\.\S+)", text, re.IGNORECASE)
    return f"[{found[1]}](https://doi.org/{found[1]})" if found else text


def _listed(stated: object) -> list[object]:
    return list(stated) if isinstance(stated, list) else [stated] if stated else []


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
