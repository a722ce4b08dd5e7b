"""Where media lie in the schema of a reference file, and what that schema is once they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import SchemaClash
from penstock.media.kinds import KINDS, Leaf, steps_of
from penstock.parquet import thrift
from penstock.parquet.footer import Footer
from penstock.parquet.splice import Job, subtrees
from penstock.parquet.thrift import BINARY, I32, LIST, STRUCT

_MEMBERS = ("bytes", "path", "file", "size", "modified")
_BYTE_ARRAY = 6


@dataclass(frozen=True, slots=True)
class Medium:
    """One media leaf as it lies in a reference file: its stored path, and the numbers of the leaves it is made from."""

    column: str
    within: str
    kind: str
    at: tuple[str, ...]  # the reference's own path
    path: tuple[str, ...]
    plain: bool  # stored as bytes, without a struct
    bytes_leaf: int
    file_leaf: int
    max_definition: int
    max_repetition: int

    @property
    def name(self) -> str:
        return self.column + self.within


@dataclass(frozen=True, slots=True)
class _Node:
    """One element of a schema with those below it."""

    number: int
    name: str
    path: tuple[str, ...]
    leaf: int | None
    optional: int  # optional and repeated elements from the top to here: the highest levels
    repeated: int
    children: tuple[_Node, ...]


def _tree(footer: Footer, column: str) -> _Node:
    """A top-level column's part of the schema."""
    trees = subtrees(footer)
    elements, leaves = trees[column]
    next_number, next_leaf = elements.start, leaves.start

    def build(path: tuple[str, ...], optional: int, repeated: int) -> _Node:
        nonlocal next_number, next_leaf
        number, element = next_number, footer.schema[next_number]
        next_number += 1
        path = (*path, element.name)
        repeated += element.repetition == "REPEATED"
        optional += element.repetition in ("OPTIONAL", "REPEATED")
        leaf = None
        if element.physical is not None:
            leaf, next_leaf = next_leaf, next_leaf + 1
        count = element.num_children if leaf is None else 0
        children = tuple(build(path, optional, repeated) for _ in range(count))
        return _Node(number, element.name, path, leaf, optional, repeated, children)

    return build((), 0, 0)


def _find(tree: _Node, leaf: Leaf, footer: Footer) -> _Node:
    """The struct of references at a leaf's place."""
    node: _Node | None = tree
    for step in steps_of(leaf.within):
        below = node.children if node else ()
        if step == "[]":
            below = below[0].children if len(below) == 1 else ()
            node = below[0] if len(below) == 1 else None
        else:
            node = next((child for child in below if child.name == step), None)
    if node is None or tuple(child.name for child in node.children) != _MEMBERS:
        raise SchemaClash(f"column {leaf.path} holds no references to media", where=footer.path)
    return node


def _media(footer: Footer, column: str, leaves: Sequence[Leaf]) -> tuple[_Node, dict[int, tuple[Leaf, _Node]]]:
    """A column's tree, and by number the elements in it that are references."""
    tree = _tree(footer, column)
    found = ((leaf, _find(tree, leaf, footer)) for leaf in leaves if leaf.column == column)
    return tree, {node.number: (leaf, node) for leaf, node in found}


def plan_leaves(job: Job, footer: Footer, leaves: Sequence[Leaf]) -> list[tuple[int, Medium | None]]:
    """The leaves of the output in order: which leaf of this file each comes from, and what it is if it holds media."""
    plan: list[tuple[int, Medium | None]] = []

    def add(node: _Node, media: dict[int, tuple[Leaf, _Node]]) -> None:
        if node.number in media:
            medium = _medium(media[node.number][0], node)
            plan.append((medium.bytes_leaf, medium))
            if not medium.plain:
                plan.append((node.children[1].leaf or 0, None))
        elif node.leaf is not None:
            plan.append((node.leaf, None))
        for child in node.children if node.number not in media else ():
            add(child, media)

    for column in job.columns:
        add(*_media(footer, column, leaves))
    return plan


def _medium(leaf: Leaf, node: _Node) -> Medium:
    plain = KINDS[leaf.kind] is None
    stored = node if plain else node.children[0]
    return Medium(
        column=leaf.column,
        within=leaf.within,
        kind=leaf.kind,
        at=node.path,
        path=stored.path,
        plain=plain,
        bytes_leaf=node.children[0].leaf or 0,
        file_leaf=node.children[2].leaf or 0,
        max_definition=stored.optional,
        max_repetition=stored.repeated,
    )


def stored_elements(job: Job, leaves: Sequence[Leaf]) -> bytes:
    """The schema's elements: references become what is stored, all others are as they were written."""
    elements = thrift.read_list(thrift.raw(job.first.top, 2, LIST))[1]
    root, _ = thrift.read_struct(elements[0])
    root[5] = I32, thrift.zigzag(len(job.columns))
    new = [thrift.write_struct(root)]

    def add(node: _Node, media: dict[int, tuple[Leaf, _Node]]) -> None:
        struct, _ = thrift.read_struct(elements[node.number])
        if len(node.path) == 1 and node.name in job.rename:
            struct[4] = BINARY, thrift.binary(job.rename[node.name].encode())
        children = node.children
        if node.number in media:
            if _medium(media[node.number][0], node).plain:
                children = ()
                struct = {number: struct[number] for number in struct if number in (3, 4, 9)}
                struct[1] = I32, thrift.zigzag(_BYTE_ARRAY)
            else:
                children = children[:2]
                struct[5] = I32, thrift.zigzag(2)
        new.append(thrift.write_struct(struct))
        for child in children:
            add(child, media)

    for column in job.columns:
        add(*_media(job.first, column, leaves))
    return thrift.write_list(STRUCT, new)
