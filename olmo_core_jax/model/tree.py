"""Nested dicts by path, for parameter trees. Imports no JAX."""

from collections.abc import Iterator, Mapping
from typing import Any


def put(tree: dict, path: tuple[str, ...], value: Any) -> None:
    """Sets a value at a path of nested dicts, making the dicts on the way."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def get(tree: Mapping, path: tuple[str, ...]) -> Any:
    """The value at a path of nested dicts. Raises KeyError."""
    for key in path:
        tree = tree[key]
    return tree


def flatten(tree: Mapping, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of every leaf of nested dicts, in order."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, (*path, key))
        else:
            yield (*path, key), value
