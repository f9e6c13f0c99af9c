from __future__ import annotations

import re
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.samples import BatchInfo
from evenstep.tree import flatten, map_leaves, unflatten


class Pair(NamedTuple):
    left: Any
    right: Any


Untyped = namedtuple("Untyped", "a b")


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any = field(init=False, default=0)


@dataclass
class Checked:
    value: Any
    built: int = 0

    def __post_init__(self) -> None:
        self.built += 1


class Fields(dict[Any, Any]):
    note = "class"


class Ids(list[Any]):
    note = "class"


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keyed = st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | keyed
        | keyed.map(OrderedDict)
        | keyed.map(lambda items: Fields(items))
        | keyed.map(UserDict)
        | st.lists(inner, max_size=3).map(Ids)
        | st.builds(Pair, inner, inner)
        | st.builds(Untyped, inner, inner)
        | st.builds(Frozen, inner)
        | st.builds(Checked, inner)
    )


TREES = st.recursive(LEAVES, containers, max_leaves=12)


def types_of(tree: Any) -> list[tuple[str, type]]:
    found = [("", type(tree))]
    if isinstance(tree, (dict, UserDict)):
        found += [(f"{k}.{p}", t) for k, v in tree.items() for p, t in types_of(v)]
    elif isinstance(tree, (list, tuple)):
        found += [(f"{k}.{p}", t) for k, v in enumerate(tree) for p, t in types_of(v)]
    elif isinstance(tree, Frozen):
        found += [(f"x.{p}", t) for p, t in types_of(tree.x)]
    elif isinstance(tree, Checked):
        found += [(f"value.{p}", t) for p, t in types_of(tree.value)]
    return found


@given(TREES)
def test_a_map_that_changes_nothing_returns_the_tree_itself(tree: Any) -> None:
    assert map_leaves(lambda _, leaf: leaf, tree) is tree


@given(TREES)
def test_mapping_there_and_back_restores_values_and_types(tree: Any) -> None:
    there = map_leaves(lambda path, leaf: ("boxed", path, leaf), tree, opaque=None)
    boxed = [leaf for _, leaf in flatten(tree)]
    back = unflatten(tree, boxed)
    assert back == tree
    assert types_of(back) == types_of(tree)
    if boxed and not isinstance(tree, (type(None), bool, int, float, str)):
        assert type(there) is type(tree)


@given(TREES)
def test_flatten_lists_what_a_map_visits_in_its_order(tree: Any) -> None:
    seen: list[tuple[str, Any]] = []

    def note(path: str, leaf: Any) -> Any:
        seen.append((path, leaf))
        return leaf

    map_leaves(note, tree)
    assert seen == flatten(tree)


def test_paths_join_keys_positions_and_field_names() -> None:
    tree = {"a": [1, Pair(2, Frozen(3))], 7: "s"}
    assert flatten(tree) == [
        ("a.0", 1),
        ("a.1.left", 2),
        ("a.1.right.x", 3),
        ("a.1.right.y", 0),
        ("7", "s"),
    ]
    assert flatten(5) == [("", 5)]


def test_the_original_is_not_changed() -> None:
    inner = {"x": 1}
    tree = {"inner": inner, "list": [1, 2]}
    assert map_leaves(lambda _, v: v + 1, tree) == {"inner": {"x": 2}, "list": [2, 3]}
    assert tree == {"inner": {"x": 1}, "list": [1, 2]}
    assert tree["inner"] is inner


def test_untouched_parts_are_shared_not_copied() -> None:
    tree = {"keep": {"x": "s"}, "change": [1]}
    changed = map_leaves(lambda _, v: v + 1 if isinstance(v, int) else v, tree)
    assert changed["keep"] is tree["keep"]
    assert changed["change"] == [2]


def test_subclasses_keep_what_they_know_beside_their_items() -> None:
    fields = Fields(a=1)
    fields.note = "mine"
    counts: defaultdict[str, int] = defaultdict(int, a=1)
    ids = Ids([1])
    ids.note = "mine"
    user: UserDict[str, int] = UserDict(a=1)
    tree = [fields, counts, ids, user]
    new = map_leaves(lambda _, v: v + 1, tree)
    assert [type(v) for v in new] == [Fields, defaultdict, Ids, UserDict]
    assert new == [{"a": 2}, {"a": 2}, [2], {"a": 2}]
    assert (new[0].note, new[2].note) == ("mine", "mine")
    assert new[1]["b"] == 0
    assert tree == [{"a": 1}, {"a": 1}, [1], {"a": 1}]


def test_frozen_and_checked_dataclasses_are_rebuilt_without_their_constructors() -> None:
    info = BatchInfo(1, 2, 3, True, 4, 5, 6, None, None)
    assert map_leaves(lambda p, v: 9 if p == "step" else v, info) == BatchInfo(
        9, 2, 3, True, 4, 5, 6, None, None
    )
    checked = Checked(1)
    assert map_leaves(lambda p, v: 5 if p == "value" else v, checked) == Checked(5, built=0)


def test_a_read_only_mapping_becomes_a_dict() -> None:
    assert map_leaves(lambda _, v: v + 1, types.MappingProxyType({"a": 1})) == {"a": 2}

    class Opened(Mapping[str, int]):
        """Made of a path rather than of a mapping."""

        def __init__(self, path: str, *, mode: str) -> None:
            self.items_of_file = {path: len(mode)}

        def __getitem__(self, key: str) -> int:
            return self.items_of_file[key]

        def __iter__(self) -> Iterator[str]:
            return iter(self.items_of_file)

        def __len__(self) -> int:
            return len(self.items_of_file)

    assert map_leaves(lambda _, v: v + 1, Opened("a", mode="r")) == {"a": 2}


def test_classes_strings_and_sets_are_leaves() -> None:
    leaves = [Frozen, "abc", b"abc", {1}, frozenset({2})]
    assert [leaf for _, leaf in flatten(leaves)] == leaves


def test_opaque_containers_are_leaves_but_plain_ones_never() -> None:
    tree = {"pair": Pair(1, 2), "list": [1]}
    assert flatten(tree, opaque=lambda _: True) == [("pair", Pair(1, 2)), ("list.0", 1)]


@pytest.mark.parametrize(("leaves", "got"), [([1], 1), ([1, 2, 3], 3)])
def test_a_wrong_number_of_leaves_is_refused(leaves: list[int], got: int) -> None:
    message = (
        f"the tree has 2 leaves, got {got}: no leaf would know its place; pass as many leaves as "
        "flatten(tree) returns"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        unflatten({"a": 0, "b": [0]}, leaves)
