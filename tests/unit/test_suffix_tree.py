"""The suffix tree against lists of sequences, counted by looking at every place."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_integrations.errors import InvalidRequestError
from ssd_workers.engine.drafters.suffix_tree import Node, SuffixTree, edge_length


def edge(node: Node) -> tuple[int, ...]:
    return tuple(node.tokens[node.start : node.start + edge_length(node)])


def shape(tree: SuffixTree, node: Node | None = None) -> Any:
    """Everything that can be asked of the tree below ``node``: edges, counts, best children."""
    at = node or tree._root
    best = tree.best_child(at) if node else None
    children = sorted(at.children.values(), key=edge)
    return [(edge(c), c.count, c is best, shape(tree, c)) for c in children]


def fresh(depth: int, closed: list[list[int]], opened: list[int]) -> SuffixTree:
    tree = SuffixTree(depth)
    for sequence in closed:
        for token in sequence:
            tree.append(token)
        tree.close()
    for token in opened:
        tree.append(token)
    return tree


def substrings(sequences: list[list[int]], depth: int) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(s[i : i + m])
        for s in sequences
        for i in range(len(s))
        for m in range(1, min(depth, len(s) - i) + 1)
    )


def assert_latest(tree: SuffixTree, sequences: list[list[int]]) -> None:
    """Every edge is a slice of the latest occurrence of its path, with the path before it."""
    latest = {
        tuple(s[i : i + m]): (number, i + m)
        for number, s in enumerate(sequences)
        for m in range(1, tree.depth + 1)
        for i in range(len(s) - m + 1)
    }
    numbers = {id(tokens): i for i, tokens in enumerate([*tree._closed, tree._open])}

    def visit(node: Node, path: tuple[int, ...]) -> None:
        for child in node.children.values():
            whole = path + edge(child)
            end = child.start + edge_length(child)
            assert tuple(child.tokens[end - len(whole) : end]) == whole
            assert (numbers[id(child.tokens)], end) == latest[whole]
            visit(child, whole)

    visit(tree._root, ())


# Appending is by far the most frequent operation, as in life.
OPERATIONS = st.lists(
    st.one_of(*[st.integers(0, 2)] * 6, st.sampled_from(["close", "evict"])), max_size=60
)


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 7), OPERATIONS)
def test_equals_the_list_of_sequences_in_whatever_order_it_changes(
    depth: int, operations: list[Any]
) -> None:
    tree = SuffixTree(depth)
    closed: deque[list[int]] = deque()
    opened: list[int] = []
    for operation in operations:
        if operation == "close":
            tree.close()
            if opened:
                closed.append(opened)
            opened = []
        elif operation == "evict":
            if closed:
                tree.evict()
                closed.popleft()
        else:
            tree.append(operation)
            opened.append(operation)
    counts = substrings([*closed, opened], depth)
    for known, count in counts.items():
        assert tree.count(known) == count
        if (*known, 0) not in counts:
            assert tree.count((*known, 0)) == 0
    assert tree.count([9]) == 0
    repeated = [
        m
        for m in range(1, min(depth, len(opened) + 1))
        if counts[tuple(opened[len(opened) - m :])] > 1
    ]
    assert [tree.count(opened[-m:]) for m in repeated] == [
        node.count for node in reversed(tree.repeated)
    ]
    assert tree.num_sequences == len(closed)
    assert tree.num_tokens == sum(map(len, closed)) + len(opened)
    assert_latest(tree, [*closed, opened])
    # Eviction leaves exactly what a fresh tree of the remaining sequences has.
    anew = fresh(depth, list(closed), opened)
    assert shape(tree) == shape(anew)
    assert tree.num_nodes == anew.num_nodes


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), OPERATIONS, OPERATIONS)
def test_goes_on_exactly_after_an_eviction(depth: int, before: list[Any], after: list[Any]) -> None:
    """What grows after an eviction grows as in a tree that never held what was evicted."""
    tokens = [[t for t in part if isinstance(t, int)] for part in (before, after)]
    old = [0, 1, 0, 0, 2, 1, 0]
    tree = fresh(depth, [old], tokens[0])
    tree.evict()
    for token in tokens[1]:
        tree.append(token)
    assert shape(tree) == shape(fresh(depth, [], tokens[0] + tokens[1]))


def test_locate_says_where_a_path_ends() -> None:
    tree = fresh(8, [[1, 2, 3, 4, 5]], [])
    found = tree.locate([7, 2, 3, 4], 1)
    assert found is not None
    node, covered = found
    assert edge(node) == (2, 3, 4, 5)
    assert covered == 3
    assert tree.locate([2, 3, 5], 0) is None
    assert tree.locate([6], 0) is None


def test_the_best_child_is_the_most_frequent_then_the_latest() -> None:
    tree = fresh(4, [[1, 5], [1, 6], [1, 5], [1, 6]], [])
    found = tree.locate([1], 0)
    assert found is not None

    def best() -> int:
        child = tree.best_child(found[0])
        assert child is not None
        return edge(child)[0]

    assert best() == 6
    tree.evict()  # 6, 5, 6
    assert best() == 6
    tree.evict()  # 5, 6
    assert best() == 6
    tree.append(1)
    tree.append(5)
    assert best() == 5


def test_edges_are_compressed() -> None:
    tree = fresh(64, [list(range(1000))], [])
    assert tree.num_nodes == 1000  # One leaf for every suffix, and nothing between.
    tree = fresh(64, [list(range(100)), list(range(100))], [])
    assert tree.num_nodes == 100


@pytest.mark.parametrize("depth", [0, -1, 257])
def test_depth_out_of_bounds_is_refused(depth: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"depth={depth}"):
        SuffixTree(depth)


def test_evicting_from_an_empty_tree_is_refused() -> None:
    tree = fresh(4, [], [1, 2])
    with pytest.raises(InvalidRequestError, match="no closed sequence"):
        tree.evict()


def test_empty_sequences_leave_no_trace() -> None:
    tree = SuffixTree(4)
    tree.close()
    tree.append(1)
    tree.close()
    tree.close()
    assert tree.num_sequences == 1


def prose(count: int, seed: int = 0) -> list[int]:
    """Ids with phrases that come again, as language has them."""
    rng = random.Random(seed)
    phrases = [[int(rng.paretovariate(0.6)) for _ in range(rng.randint(2, 12))] for _ in range(300)]
    ids: list[int] = []
    while len(ids) < count:
        ids += phrases[min(int(rng.paretovariate(0.5)), 299)]
    return ids[:count]


def test_memory_is_known_and_freed() -> None:
    ids = prose(20_000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tree = fresh(
            32, [[int(str(i)) for i in ids[k : k + 200]] for k in range(0, 20_000, 200)], []
        )
        used = tracemalloc.get_traced_memory()[0] - before
        assert 0.6 * used < tree.nbytes < 1.6 * used
        while tree.num_sequences:
            tree.evict()
        assert tree.num_nodes == tree.num_tokens == tree.nbytes == 0
        assert tracemalloc.get_traced_memory()[0] - before < 0.02 * used
    finally:
        tracemalloc.stop()


def test_a_token_costs_little_even_where_everything_repeats() -> None:
    """Far below a millisecond; the bound is loose for slow and busy machines."""
    ids = prose(2_000)
    tree = fresh(64, [ids], [])
    started = time.process_time()
    for token in ids:
        tree.append(token)
    assert (time.process_time() - started) / len(ids) < 0.0005
