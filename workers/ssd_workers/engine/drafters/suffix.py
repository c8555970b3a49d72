"""Suffix decoding: what most often followed these tokens, here and in earlier answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_integrations.errors import InvalidRequestError
from ssd_workers.engine.drafters.base import CopyingDrafter, DraftView
from ssd_workers.engine.drafters.suffix_store import SuffixStore
from ssd_workers.engine.drafters.suffix_tree import Node, SuffixTree, edge_length

# Replayed on recorded answers (benchmarks/replay_drafters.py), the two together draft 2 to 17 %
# better than zeros, most of all where answers are similar; 0.5 and 1 do equally well.
#
# Nothing follows the last tokens of the request's own text: that occurrence does not count.
_OWN_END = -1.0
# What came next in another answer is a little less sure than in this one.
_OTHER_TEXT = 0.5


@dataclass
class _Running:
    """A running request and the tree of its prompt and output."""

    view: DraftView
    tree: SuffixTree


class SuffixDrafter(CopyingDrafter):
    """Drafts what earlier text makes likely; needs no model, and learns while it works.

    Two kinds of :class:`SuffixTree` are looked up: one per running request (prompt and output),
    and one of the outputs of finished requests, first in first out. For every length m such that
    the last m tokens occur in a tree, a draft follows the most frequent next token (the most
    recent one among equals), with a probability that is the product of the shares of that token at
    each step. It has at most m * ``factor`` + ``offset`` tokens, since a short match is weak
    evidence, and ends where the probability falls below ``min_prob``. A draft's score, the sum of
    its probabilities, tells which is likely to stand longest; the best is proposed, in case
    of a tie the one with the longer match, then the one from the request's own tree.

    The end of the request's own text, after which nothing came yet, is no occurrence; and to
    those in other texts half of one is added, after which something else came. So precedents in
    the own text are preferred, and single ones elsewhere are trusted to two thirds.

    Requests share the tree of finished outputs. What one user was answered never shows in another
    user's text, but a draft that fits makes it faster.

    Parameters:
      depth: longest match and draft together, in tokens.
      factor, offset: how the longest draft depends on the length of the match.
      min_prob: least probability of a drafted token, in (0, 1].
      max_requests: how many finished requests are remembered, 0 for none.
      max_tokens: how many tokens of them, at most; about 270 bytes each.
      store: keeps the outputs of finished requests for the next start. None keeps nothing on disk.

    Raises:
      InvalidRequestError: a parameter is out of bounds, or the store cannot be read.
      EngineError: the store is locked by another process.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        depth: int = 64,
        factor: float = 2.0,
        offset: float = 0.0,
        min_prob: float = 0.25,
        max_requests: int = 10_000,
        max_tokens: int = 250_000,
        store: SuffixStore | None = None,
    ) -> None:
        if factor < 0 or factor + offset < 1:
            raise InvalidRequestError(
                f"factor={factor:g} and offset={offset:g} leave no draft after one matched token.",
                remedy="Give a factor of at least 0 that makes factor + offset at least 1.",
            )
        if not 0 < min_prob <= 1:
            raise InvalidRequestError(
                f"min_prob={min_prob:g} is not a probability.", remedy="Give 0 < min_prob <= 1."
            )
        if max_requests < 0 or max_tokens < 0:
            raise InvalidRequestError(
                f"max_requests={max_requests} and max_tokens={max_tokens} must not be negative."
            )
        self._depth = depth
        self._factor = factor
        self._offset = offset
        self._min_prob = min_prob
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._finished = SuffixTree(depth)
        self._running: dict[str, _Running] = {}
        if store is not None:
            for tokens in store.load():
                self._remember(tokens)
        self._store = store

    @property
    def nbytes(self) -> int:
        """Memory of all trees in bytes, estimated."""
        own = sum(running.tree.nbytes for running in self._running.values())
        return self._finished.nbytes + own

    @property
    def num_remembered(self) -> int:
        """How many finished requests are remembered."""
        return self._finished.num_sequences

    def propose(self, sequences: Sequence[DraftView], max_tokens: Sequence[int]) -> list[list[int]]:
        """Draft at most ``max_tokens[i]`` tokens for ``sequences[i]``."""
        return [tokens for tokens, _ in self.propose_scored(sequences, max_tokens)]

    def propose_scored(
        self, sequences: Sequence[DraftView], max_tokens: Sequence[int]
    ) -> list[tuple[list[int], float]]:
        """The drafts, each with the sum of its tokens' probabilities.

        It is too high by a factor of 1.5 to 3, which depends on the text: what came before is no
        fair sample of what comes. It is good for comparing drafts.
        """
        return [
            self._propose_one(sequence, limit)
            for sequence, limit in zip(sequences, max_tokens, strict=True)
        ]

    def forget(self, request_id: str) -> None:
        """Free the request's own tree and remember its output; unknown ids are fine."""
        running = self._running.pop(request_id, None)
        if running is None:
            return
        output = running.view.token_ids[running.view.prompt_length :]
        if len(output) < 2:
            return  # Nothing follows anything.
        self._remember(output)
        if self._store is not None:
            self._store.append(output)

    def close(self) -> None:
        """Write what the store still holds back."""
        if self._store is not None:
            self._store.flush()

    def _remember(self, tokens: Sequence[int]) -> None:
        tree = self._finished
        if not self._max_requests or not self._max_tokens:
            return
        tokens = tokens[-self._max_tokens :]
        while tree.num_sequences and (
            tree.num_sequences >= self._max_requests
            or tree.num_tokens + len(tokens) > self._max_tokens
        ):
            tree.evict()
        for token in tokens:
            tree.append(token)
        tree.close()

    def _propose_one(self, sequence: DraftView, limit: int) -> tuple[list[int], float]:
        own = self._own_tree(sequence)
        if limit <= 0:
            return [], 0.0
        tokens = sequence.token_ids
        in_own = own.repeated
        longest = self._longest_match(tokens)
        best: list[int] = []
        best_score = 0.0
        for m in range(max(len(in_own), longest), 0, -1):
            budget = min(limit, int(m * self._factor + self._offset))
            if budget <= best_score:
                break  # No shorter match can score more.
            if m <= len(in_own):
                node = in_own[-m]
                draft, score = self._follow(own, node, edge_length(node), budget, _OWN_END)
                if score > best_score:
                    best, best_score = draft, score
            if m <= longest:
                found = self._finished.locate(tokens, len(tokens) - m)
                assert found is not None  # m is at most the longest that occurs
                draft, score = self._follow(self._finished, *found, budget, _OTHER_TEXT)
                if score > best_score:
                    best, best_score = draft, score
        return best, best_score

    def _own_tree(self, sequence: DraftView) -> SuffixTree:
        """The request's own tree, brought up to its newest token."""
        running = self._running.get(sequence.request_id)
        tokens = sequence.token_ids
        if running is None or running.tree.num_tokens > len(tokens):
            running = _Running(sequence, SuffixTree(self._depth))
            self._running[sequence.request_id] = running
        tree = running.tree
        for index in range(tree.num_tokens, len(tokens)):
            tree.append(tokens[index])
        return tree

    def _longest_match(self, tokens: list[int]) -> int:
        """How many of the last tokens occur in finished outputs."""
        low, high = 0, min(len(tokens), self._depth - 1)
        while low < high:
            middle = (low + high + 1) // 2
            if self._finished.locate(tokens, len(tokens) - middle) is None:
                high = middle - 1
            else:
                low = middle
        return low

    def _follow(
        self, tree: SuffixTree, node: Node, covered: int, budget: int, doubt: float
    ) -> tuple[list[int], float]:
        """At most ``budget`` tokens from ``covered`` tokens into the edge to ``node`` on.

        ``doubt`` is added to the number of occurrences that the first token has a share of.
        """
        draft: list[int] = []
        score, prob = 0.0, 1.0
        total = node.count + doubt
        while len(draft) < budget:
            if covered == edge_length(node):
                child = tree.best_child(node)
                if child is None:
                    break
                node, covered = child, 0
            prob *= node.count / total
            if prob < self._min_prob:
                break
            length = edge_length(node)
            first = node.start + covered
            piece = node.tokens[first : first + min(budget - len(draft), length - covered)]
            draft += piece
            score += prob * len(piece)
            total, covered = node.count, length
        return draft, score
