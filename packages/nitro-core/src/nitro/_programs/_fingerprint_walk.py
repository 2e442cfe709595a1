"""Walks everything that the roots reach, and hashes it in one canonical way.

The objects form a graph with cycles: a function may call itself, a method knows its class.
The hash of an object stands for all that can be read off by walking on from it, and for
nothing else: not for the order in which objects are met, nor for whether two equal objects
are one. What reaches no cycle is hashed from the leaves up. The rest is told apart by
partition refinement, as in the minimisation of a finite automaton.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, cast

from ._fingerprint_names import PARENT, Owner, Part, Reading
from ._fingerprint_origin import LibraryName
from ._fingerprint_read import read
from ._fingerprint_values import digest_of, encode_atom, framed, is_atom

# How deep containers made afresh by each reading are compared before giving up.
_SAME_DEPTH: Final = 6


@dataclass(eq=False)
class Node:
    """One object of the graph.

    Attributes:
        value: The object, kept alive so that its `id` stays its own.
        reading: What it was when it was read.
        label: Its name for a person, different from that of every other node.
        short: Its name inside the labels of its parts.
        items: What it held if it is a builtin container, None otherwise.
        children: For each part the node it refers to, None for an atom.
        digest: Hash of all that can be reached from it.
    """

    value: object
    reading: Reading
    label: str
    short: str
    items: tuple[object, ...] | None = None
    children: list[Node | None] = field(default_factory=list["Node | None"])
    digest: bytes = b""


def walk(roots: Iterable[Part], owner: Owner) -> list[Node]:
    """Reads the graph below some roots; its first node stands for the roots themselves."""
    top = Node(None, Reading("roots", parts=tuple(roots)), "", "")
    nodes: dict[object, Node] = {}
    labels: set[str] = set()
    queue = deque([top])
    while queue:
        node = queue.popleft()
        for part in node.reading.parts:
            if is_atom(part.value):
                node.children.append(None)
                continue
            child = nodes.get(_identity(part.value))
            if child is None:
                child = _make_node(part, node, owner, labels)
                nodes[_identity(part.value)] = child
                queue.append(child)
            node.children.append(child)
    graph = [top, *nodes.values()]
    _hash(graph)
    return graph


def label_of(part: Part, parent: Node) -> str:
    """Names a part after its parent, unless it has a name of its own."""
    return (part.label or PARENT + part.key).replace(PARENT, parent.short)


def is_current(graph: list[Node], owner: Owner) -> bool:
    """Reads every object again, and tells whether all that it rests on is unmoved."""
    return all(_is_unmoved(node, owner) for node in graph[1:])


def _is_unmoved(node: Node, owner: Owner) -> bool:
    if node.items is None:
        return _same_reading(node.reading, read(node.value, owner))
    # A container that holds the same objects as before needs no reading: they are either
    # atoms, or nodes of their own.
    items = _items_of(node.value) or ()
    return len(items) == len(node.items) and all(map(operator.is_, items, node.items))


def _items_of(value: object) -> tuple[object, ...] | None:
    if type(value) is list or type(value) is tuple:
        return tuple(cast("list[object]", value))
    if type(value) is dict:
        pairs = cast("dict[object, object]", value)
        return (*pairs, *pairs.values())
    return None


def own_digest(node: Node) -> bytes:
    """Hashes an object without its parts, which are compared under their own names."""
    keys = [part.key.encode("utf-8", "surrogatepass") for part in node.reading.parts]
    return digest_of(node.reading.kind.encode(), node.reading.header, *keys)


def _identity(value: object) -> object:
    return value if isinstance(value, LibraryName) else id(value)


def _make_node(part: Part, parent: Node, owner: Owner, labels: set[str]) -> Node:
    reading = read(part.value, owner)
    is_root = parent.reading.kind == "roots"
    short = part.label if is_root else reading.name or label_of(part, parent)
    label = f"{short} in {reading.file}" if reading.file and not is_root else short
    unique, count = label, 1
    while unique in labels:
        count += 1
        unique = f"{label} #{count}"
    labels.add(unique)
    return Node(part.value, reading, unique, short, _items_of(part.value))


# Hashing ----------------------------------------------------------------------------------


def _hash(graph: list[Node]) -> None:
    cyclic = _hash_acyclic(graph)
    if not cyclic:
        return
    # Each round tells nodes apart that differ one step further away. Once a round splits
    # no group, the groups, and how they lead to one another, say all there is to say.
    colours = {id(node): _combine(node, lambda child: child.digest) for node in cyclic}
    groups = 0
    while groups < len(set(colours.values())):
        groups = len(set(colours.values()))
        before = colours
        colours = {id(node): _combine(node, _colour_in(before)) for node in cyclic}
        if groups == len(set(colours.values())):
            break
    after = {id(node): _combine(node, _colour_in(colours)) for node in cyclic}
    table = digest_of(*sorted({colours[key] + after[key] for key in colours}))
    for node in cyclic:
        node.digest = digest_of(after[id(node)], table)


def _hash_acyclic(graph: list[Node]) -> list[Node]:
    """Hashes each node whose children are hashed, as long as there are any; returns the rest."""
    parents: dict[int, list[Node]] = {}
    waiting = {id(node): 0 for node in graph}
    for node in graph:
        for child in node.children:
            if child is not None:
                parents.setdefault(id(child), []).append(node)
                waiting[id(node)] += 1
    ready = [node for node in graph if waiting[id(node)] == 0]
    for node in ready:  # grows while it is walked
        node.digest = _combine(node, lambda child: child.digest)
        for parent in parents.get(id(node), ()):
            waiting[id(parent)] -= 1
            if waiting[id(parent)] == 0:
                ready.append(parent)
    return [node for node in graph if not node.digest]


def _colour_in(colours: dict[int, bytes]) -> Callable[[Node], bytes]:
    return lambda child: child.digest or colours[id(child)]


def _combine(node: Node, digest: Callable[[Node], bytes]) -> bytes:
    pieces = [
        framed(
            part.key.encode("utf-8", "surrogatepass"),
            b"atom" if child is None else b"node",
            encode_atom(part.value) if child is None else digest(child),
        )
        for part, child in zip(node.reading.parts, node.children, strict=True)
    ]
    if not node.reading.has_order:
        pieces.sort()
    return digest_of(node.reading.kind.encode(), node.reading.header, *pieces)


# Comparing two readings -------------------------------------------------------------------


def _same_reading(old: Reading, new: Reading) -> bool:
    return (
        old.header == new.header
        and old.kind == new.kind
        and len(old.parts) == len(new.parts)
        and all(map(_same_part, old.parts, new.parts))
    )


def _same_part(old: Part, new: Part) -> bool:
    return old.key == new.key and (old.value is new.value or same(old.value, new.value))


def same(old: object, new: object, depth: int = _SAME_DEPTH) -> bool:
    """Tells whether two values are one, or certainly equal in content.

    Containers that a reading makes afresh are compared item by item; those of the user are
    one object, whose own content is compared when it is read again itself.
    """
    if old is new:
        return True
    if type(old) is not type(new) or depth == 0:
        return False
    if is_atom(old):
        return encode_atom(old) == encode_atom(new)
    if isinstance(old, LibraryName):
        return old == new
    match old, new:
        case (list() | tuple(), list() | tuple()) if type(old) in (list, tuple):
            pairs = zip(old, new, strict=False)
            return len(old) == len(new) and all(same(a, b, depth - 1) for a, b in pairs)
        case (dict(), dict()) if type(old) is dict:
            return same(list(old.items()), list(new.items()), depth - 1)
        case _:
            return False
