"""One expensive object in a process for each set of options: engines, backends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByOptions(Generic[K, V]):
    """Objects of which equal options share one. Safe to use from any thread."""

    def __init__(self) -> None:
        self.forget()

    def get(self, options: K, make: Callable[[], V]) -> V:
        """The object for ``options``, made by the first who asks; the others wait for it.

        What ``make`` raises goes to who asked; the next one tries anew.
        """
        with self._lock:
            making = self._making.setdefault(options, threading.Lock())
        with making:
            made = self.find(options)
            if made is None:
                made = make()
                with self._lock:
                    self._made[options] = made
            return made

    def find(self, options: K) -> V | None:
        """The object for ``options`` if it is made."""
        with self._lock:
            return self._made.get(options)

    def take(self, options: K) -> V | None:
        """The object for ``options``, which the next who asks has to make anew."""
        with self._lock:
            return self._made.pop(options, None)

    def take_all(self) -> list[V]:
        """Every object there is; whoever asks now has to make it anew."""
        with self._lock:
            made = list(self._made.values())
            self._made.clear()
        return made

    def forget(self) -> None:
        """Start anew, with new locks: in a forked child nobody would release the old ones."""
        self._lock = threading.Lock()
        self._making: dict[K, threading.Lock] = {}
        self._made: dict[K, V] = {}
