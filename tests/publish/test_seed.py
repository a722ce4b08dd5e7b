"""What a fresh card says."""

from __future__ import annotations

import pytest

from penstock.publish.card import read_card
from penstock.publish.seed import bids_seed, license_id, seeded_body

DESCRIPTION = {
    "Name": "Resting\n state ",
    "BIDSVersion": "1.9.0",
    "License": "CC0",
    "Authors": ["A. One", "B. Two"],
    "DatasetDOI": "doi:10.18112/openneuro.ds000001.v1.0.0",
}


def test_a_body_says_how_to_load_and_verify() -> None:
    body = seeded_body("org/name", title="A title", about=["One line.", "Two."])
    assert body.startswith("\n# A title\n\nOne line.\nTwo.\n\n## Load\n")
    assert 'load_dataset("org/name")' in body
    assert "penstock verify org/name\n" in body
    assert seeded_body("org/name").startswith("\n# name\n\n## Load\n")
    assert 'load_dataset("org/name", "scans")' in seeded_body("org/name", config_name="scans")


def test_a_bids_tree_seeds_its_card() -> None:
    card = bids_seed(DESCRIPTION, "About\r\n=====\r\n", "1.0 2020\n - ```x```\n", repo_id="org/name")
    assert card.data == {"pretty_name": "Resting state", "license": "cc0-1.0"}
    assert card.body.startswith(
        "\n# Resting state\n\n- Authors: A. One, B. Two\n- License: CC0\n"
        "- DOI: [10.18112/openneuro.ds000001.v1.0.0](https://doi.org/10.18112/openneuro.ds000001.v1.0.0)\n"
        "- BIDS version: 1.9.0\n\nAbout\n=====\n\n## Changes\n\n````text\n1.0 2020\n - ```x```\n````\n\n## Load\n"
    )
    again = read_card(card.render())
    assert (again.data, again.body) == (card.data, card.body)


@pytest.mark.parametrize("odd", [{}, {"Name": None, "Authors": "One", "License": 3, "DatasetDOI": ["x"]}])
def test_a_description_that_says_little(odd: dict[str, object]) -> None:
    card = bids_seed(odd, None, " \n", repo_id="org/name")
    assert card.data == {"pretty_name": "name"}
    assert "# name\n" in card.body
    assert "Changes" not in card.body


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ("CC0", "cc0-1.0"),
        ("CC0 1.0", "cc0-1.0"),
        ("cc-by-4.0", "cc-by-4.0"),
        ("CC BY 4.0", "cc-by-4.0"),
        ("CC BY-NC-SA 4.0", "cc-by-nc-sa-4.0"),
        ("Creative Commons Attribution-ShareAlike 4.0 International (CC BY-SA 4.0)", "cc-by-sa-4.0"),
        ("Creative Commons Attribution-NonCommercial 4.0 International", "cc-by-nc-4.0"),
        ("PDDL", "pddl"),
        ("ODC-By v1.0", "odc-by"),
        ("The MIT License", "mit"),
        ("Apache License, Version 2.0", "apache-2.0"),
        ("PD", None),
        ("CC BY", None),
        ("CC BY 9.0", None),
        ("see LICENSE", None),
        ("", None),
    ],
)
def test_only_a_licence_that_the_hub_names(stated: str, name: str | None) -> None:
    assert license_id(stated) == name
