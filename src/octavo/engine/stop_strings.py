"""Finds stop strings in a text that arrives piece by piece.

An Aho-Corasick automaton (Aho and Corasick, 1975): each character is looked at once, however many stop strings
there are and however the text is cut into pieces. The state says both whether a stop string has just ended and
how much of the text so far could still be the beginning of one.
"""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache


class StopAutomaton:
    """The stop strings of a request as a machine; states are numbers, 0 is the start. Immutable."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.stop: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self.next[state]:
                    self.next[state][char] = len(self.next)
                    self.next.append({})
                    self.stop.append(None)
                state = self.next[state][char]
            self.stop[state] = stop
        self.depth = [0] * len(self.next)  # characters at the end of the text that the state stands for
        self.fallback = [0] * len(self.next)
        self.pending = [0] * len(self.next)  # those of them that may still begin a stop string
        queue = deque([0])
        while queue:
            state = queue.popleft()
            fallback = self.fallback[state]
            self.pending[state] = self.depth[state] if self.next[state] else self.pending[fallback]
            self.stop[state] = self.stop[state] or self.stop[fallback]
            for char, child in self.next[state].items():
                self.depth[child] = self.depth[state] + 1
                self.fallback[child] = self.step(fallback, char) if state else 0
                queue.append(child)
        self._begin = re.compile("[" + "".join(map(re.escape, self.next[0])) + "]")

    def cannot_begin_in(self, text: str) -> bool:
        return self._begin.search(text) is None

    def step(self, state: int, char: str) -> int:
        while (found := self.next[state].get(char)) is None:
            if state == 0:
                return 0
            state = self.fallback[state]
        return found

    def scan(self, state: int, text: str) -> tuple[int, int]:
        """Read `text` up to the first stop string that ends in it.

        Returns the new state and the number of characters read, which ends that stop string if
        `stop[new state]` is not None. Of stop strings that end together, the longest counts.
        """
        position, length = 0, len(text)
        while position < length:
            if state == 0:
                begin = self._begin.search(text, position)
                if begin is None:
                    return 0, length
                position = begin.start()
            state = self.step(state, text[position])
            position += 1
            if self.stop[state] is not None:
                break
        return state, position


@lru_cache(maxsize=128)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(stops)
