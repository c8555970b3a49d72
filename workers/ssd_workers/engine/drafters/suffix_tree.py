"""A trie of the substrings of token sequences, with the number of occurrences of each.

It holds every suffix of every sequence, cut to ``depth`` tokens, so every substring of at most
that length is a path from the root. Paths are compressed: a node stands where paths part or where
a suffix ends, and the tokens on the edge that leads to it are a slice of a sequence, not a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ssd_integrations.errors import InvalidRequestError

_NO_CHILDREN: dict[int, Node] = {}
"""Shared by all leaves; never changed."""

# Measured with tracemalloc on CPython 3.11: a node with its share of the parent's table of
# children, and a token's integer with its place in a list.
_NODE_BYTES = 164
_TOKEN_BYTES = 40

MAX_DEPTH = 256


class Node:
    """A place in the trie and the edge that leads to it.

    ``tokens[start : start + length]`` are the edge's tokens, as they stand in the latest of the
    ``count`` occurrences of the path, and the path's earlier tokens stand before them. The edge of
    a suffix that occurs once ends with its sequence, however long that becomes: there ``length``
    is only an upper bound (see :func:`edge_length`). ``best`` is the most frequent child, None
    where that is not known.
    """

    __slots__ = ("best", "children", "count", "length", "start", "tokens")

    def __init__(
        self,
        tokens: list[int],
        start: int,
        length: int,
        count: int,
        children: dict[int, Node],
        best: Node | None,
    ) -> None:
        self.tokens = tokens
        self.start = start
        self.length = length
        self.count = count
        self.children = children
        self.best = best


def edge_length(node: Node) -> int:
    """How many tokens the edge to ``node`` has."""
    known = len(node.tokens) - node.start
    return node.length if node.length < known else known


class SuffixTree:
    """Counts of all substrings of up to ``depth`` tokens in a queue of sequences.

    One sequence is open and grows at its end (:meth:`append`); :meth:`close` puts it behind the
    others, and :meth:`evict` removes the oldest. At every moment the trie is the one that a fresh
    tree of the same sequences would have, node for node.

    Appending a token costs O(1) per suffix of the open sequence that occurs elsewhere too, at
    most ``depth``; suffixes that occur once grow by themselves. Evicting costs O(depth) a token
    at most. Memory is at most two nodes per token (:attr:`nbytes`).

    Parameters:
      depth: longest substring counted, 1 to 256 tokens.

    Raises:
      InvalidRequestError: ``depth`` is out of bounds.
    """

    def __init__(self, depth: int) -> None:
        if not 1 <= depth <= MAX_DEPTH:
            raise InvalidRequestError(
                f"A suffix tree of depth={depth} is not possible.",
                remedy=f"Give 1 to {MAX_DEPTH} tokens.",
            )
        self.depth = depth
        self.num_nodes = 0
        self.num_tokens = 0
        self._root = Node([], 0, 0, 0, {}, None)
        self._closed: deque[list[int]] = deque()
        self._open: list[int] = []
        # Where the open sequence's suffixes end that occur elsewhere too, longest first. If a
        # suffix occurs twice then so do all shorter ones: these are the last len() ones.
        self._active: list[Node] = []

    @property
    def num_sequences(self) -> int:
        """How many closed sequences there are."""
        return len(self._closed)

    @property
    def nbytes(self) -> int:
        """Memory in bytes, estimated from the numbers of nodes and tokens."""
        return self.num_nodes * _NODE_BYTES + self.num_tokens * _TOKEN_BYTES

    @property
    def repeated(self) -> list[Node]:
        """Where the open sequence's last 1, 2, 3... tokens end, longest first.

        Only those that occur elsewhere too, and are shorter than ``depth``. Read, do not change.
        """
        return self._active

    def append(self, token: int) -> None:
        """Extend the open sequence by one token."""
        tokens = self._open
        at = len(tokens)
        tokens.append(token)
        self.num_tokens += 1
        active = self._active
        active.append(self._root)
        # How far the longest of them may still reach.
        room = self.depth - len(active) + 1
        moved = []
        for node in active:
            child = node.children.get(token)
            if child is None:
                self._add_leaf(node, token, at, room)
            elif node.count == child.count + 1 and len(node.children) == 1:
                # Nothing but this suffix ends at the node: move the node along the edge.
                self._slide(node, child)
                moved.append(node)
            else:
                moved.append(self._enter(node, child, at))
            room += 1
        if len(moved) == self.depth:
            del moved[0]
        self._active = moved

    def close(self) -> None:
        """End the open sequence, which becomes the newest closed one; an empty one is dropped."""
        if self._open:
            self._closed.append(self._open)
        self._open = []
        self._active = []

    def evict(self) -> None:
        """Remove the oldest closed sequence.

        Raises:
          InvalidRequestError: there is none.
        """
        if not self._closed:
            raise InvalidRequestError("The suffix tree has no closed sequence to evict.")
        tokens = self._closed.popleft()
        for start in range(len(tokens)):
            self._remove_suffix(tokens, start)
        self.num_tokens -= len(tokens)
        self._free_unique_suffixes()

    def count(self, tokens: Sequence[int]) -> int:
        """How often ``tokens``, 1 to ``depth`` of them, occur."""
        found = self.locate(list(tokens), 0)
        return found[0].count if found else 0

    def locate(self, tokens: list[int], start: int) -> tuple[Node, int] | None:
        """Where the path ``tokens[start:]`` ends; None if it does not occur.

        Returns: the node whose edge it ends on, and how many of the edge's tokens it covers.
        """
        node, at, end = self._root, start, len(tokens)
        covered = 0
        while at < end:
            child = node.children.get(tokens[at])
            if child is None:
                return None
            covered = min(edge_length(child), end - at)
            if covered > 1:
                first = child.start
                if child.tokens[first : first + covered] != tokens[at : at + covered]:
                    return None
            node = child
            at += covered
        return node, covered

    def best_child(self, node: Node) -> Node | None:
        """The most frequent child of ``node``, the most recent one among equals."""
        if node.best is None and node.children:
            age = {id(tokens): i for i, tokens in enumerate((*self._closed, self._open))}
            node.best = max(
                node.children.values(), key=lambda c: (c.count, age[id(c.tokens)], c.start)
            )
        return node.best

    def _add_leaf(self, node: Node, token: int, at: int, room: int) -> None:
        """``node`` and ``token`` at index ``at`` are a path that occurs here for the first time."""
        leaf = Node(self._open, at, room, 1, _NO_CHILDREN, None)
        self.num_nodes += 1
        if node.children is _NO_CHILDREN:
            node.children = {token: leaf}
            node.best = leaf
        else:
            node.children[token] = leaf
            if node.best is not None and node.best.count == 1:
                node.best = leaf

    def _slide(self, node: Node, child: Node) -> None:
        """Move the end of ``node`` one token towards its only child."""
        if edge_length(child) == 1:
            # No suffix of the open sequence ends at the child: its longer ones are past it
            # already, and its shorter ones have not come so far.
            node.children = child.children
            node.best = child.best
            self.num_nodes -= 1
        else:
            child.start += 1
            child.length -= 1
            node.children = {child.tokens[child.start]: child}
        # The edge has been a slice of the open sequence since this suffix came onto it.
        node.length += 1

    def _enter(self, node: Node, child: Node, at: int) -> Node:
        """Go from ``node`` one token into the edge to ``child``; where that ends."""
        if edge_length(child) == 1:
            entered = child
            child.length = 1
            child.count += 1
            child.tokens = self._open
            child.start = at
        else:
            following = child.tokens[child.start + 1]
            entered = Node(self._open, at, 1, child.count + 1, {following: child}, child)
            node.children[self._open[at]] = entered
            child.start += 1
            child.length -= 1
            self.num_nodes += 1
        best = node.best
        if best is child or (best is not None and entered.count >= best.count):
            node.best = entered
        return entered

    def _remove_suffix(self, tokens: list[int], start: int) -> None:
        end = min(start + self.depth, len(tokens))
        parent, node, at = self._root, self._root, start
        while at < end:
            token = tokens[at]
            child = node.children[token]
            child.count -= 1
            if node.best is child:
                node.best = None
            if child.count == 0:
                self._cut(node, token)
                break
            at += edge_length(child)
            parent, node = node, child
        if node is not self._root and len(node.children) == 1:
            (child,) = node.children.values()
            if child.count == node.count:
                self._join(parent, node, child)

    def _cut(self, node: Node, token: int) -> None:
        """Remove the child of ``node`` behind ``token``: nothing passes through it any more."""
        # It has no children: they would have been counted down, and cut, before it.
        del node.children[token]
        self.num_nodes -= 1
        if not node.children and node is not self._root:
            node.children = _NO_CHILDREN

    def _join(self, parent: Node, node: Node, child: Node) -> None:
        """Make one edge of those to ``node``, where nothing parts or ends, and its only child."""
        parent.children[node.tokens[node.start]] = child
        if parent.best is node:
            parent.best = child
        child.start -= node.length
        child.length += node.length
        self.num_nodes -= 1

    def _free_unique_suffixes(self) -> None:
        """Let suffixes of the open sequence that occur nowhere else any more grow by themselves."""
        active = self._active
        while active and active[0].count == 1:
            active[0].length += self.depth - len(active)
            del active[0]
