"""Token ids to text as they come, ending at stop strings: the only producer of the text of a choice.

Text is decoded from bytes, so a character spread over tokens comes once it is whole, and what is still half at
the end becomes one U+FFFD. The sum of the deltas is `Tokenizer.decode` of all tokens, however they were pushed.

Stop strings are looked for in what the client reads and in what the model wrote, which differ where special
tokens are skipped: "<|eot_id|>" stops although it is never shown. The stop string that ends first counts, and of
those that end together the longest, so the answer does not depend on how tokens come in steps. Text that may be
the beginning of one is held back until that is decided.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import NamedTuple

from octavo.engine.stop_strings import stop_automaton
from octavo.engine.tokenizer import Tokenizer, TokenReader
from octavo.request import SamplingParams


class TextDelta(NamedTuple):
    """What a push made known."""

    text: str
    num_tokens: int  # of this push that belong to the choice: up to the one that completed a stop string
    stop: str | None  # the stop string that ended the choice
    text_offsets: tuple[int, ...]  # for each of them: characters of the choice's text before it, nothing cut


class IncrementalDetokenizer:
    """The text of one choice. Not thread-safe.

    The text continues the prompt: a character that the prompt's last tokens began is completed, and the space
    that a text may not begin with is dropped only if the prompt shows nothing.
    """

    __slots__ = (
        "_automaton",
        "_hidden",
        "_held",
        "_includes_stop",
        "_is_finished",
        "_min_tokens",
        "_num_chars",
        "_num_tokens",
        "_pending",
        "_raw_state",
        "_read",
        "_reader",
        "_skipped_ids",
        "_state",
        "_strips_space",
        "_table",
        "_tokenizer",
    )

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.byte_table(sampling.skip_special_tokens)
        prompt_shows = any(self._table[token_id] for token_id in prompt_token_ids)
        self._strips_space = tokenizer.strips_leading_space and not prompt_shows
        self._reader = TokenReader(
            tokenizer, sampling.skip_special_tokens, sampling.spaces_between_special_tokens, not prompt_shows
        )
        self._read: Callable[[int], bytes] = self._read_first
        self._pending = self._unfinished_character(prompt_token_ids)
        self._num_chars = 0  # of all text, what is held back included
        self._is_finished = False
        self._automaton = stop_automaton(sampling.stop) if sampling.stop else None
        self._includes_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._held = ""
        self._state = 0
        # Where special tokens are skipped: the state in the text with them while it differs, and where they stood
        # since then, as (characters of text before, length).
        self._skipped_ids = tokenizer.special_token_ids if sampling.skip_special_tokens else frozenset()
        self._raw_state: int | None = None
        self._hidden: list[tuple[int, int]] = []

    def push(self, token_ids: Sequence[int], *, finished: bool = False, ended_by_token: bool = False) -> TextDelta:
        """Read on. `finished` releases everything: the choice ends here, whatever the reason.

        `ended_by_token`: the last id is an EOS or stop token, which is counted, but not text (unless
        include_stop_str_in_output asks for it).
        """
        assert not self._is_finished, "a push after the end"
        count = len(token_ids)
        if ended_by_token and not self._includes_stop:
            token_ids = token_ids[:-1]
        if self._automaton is not None:
            delta = self._push_with_stops(token_ids, finished)
            if delta.stop is not None:
                return delta
            text, offsets = delta.text, delta.text_offsets
        else:
            starts: list[int] = []
            parts: list[str] = []
            for token_id in token_ids:
                starts.append(self._num_chars)
                part = self._decode(self._read(token_id))
                self._num_chars += len(part)
                parts.append(part)
            if finished:
                parts.append(self._decode_end())
            text, offsets = "".join(parts), tuple(starts)
        self._is_finished = finished
        if count != len(offsets):
            offsets = (*offsets, self._num_chars)
        return TextDelta(text, count, None, offsets)

    def _push_with_stops(self, token_ids: Sequence[int], finished: bool) -> TextDelta:
        automaton = self._automaton
        assert automaton is not None
        starts: list[int] = []
        parts: list[str] = []
        for token_id in token_ids:
            starts.append(self._num_chars)
            self._num_tokens += 1
            may_stop = self._num_tokens > self._min_tokens
            if token_id in self._skipped_ids:
                found = self._look_in_hidden(self._tokenizer.token_text(token_id), may_stop)
            else:
                text = self._decode(self._read(token_id))
                if not self._held and self._raw_state is None and automaton.cannot_begin_in(text):
                    self._num_chars += len(text)
                    parts.append(text)
                    continue
                found = self._look_in(text, may_stop)
            if found is not None:
                return self._end_at(found, parts, starts)
            parts.append(self._take_decided())
        if finished:
            found = self._look_in(self._decode_end(), self._num_tokens > self._min_tokens)
            if found is not None:
                return self._end_at(found, parts, starts)
            parts.append(self._held)
        return TextDelta("".join(parts), len(starts), None, tuple(starts))

    def _end_at(self, found: tuple[int, str], parts: list[str], starts: list[int]) -> TextDelta:
        self._is_finished = True
        start, stop = found
        parts.append(self._held[: start - (self._num_chars - len(self._held))])
        if self._includes_stop:
            parts.append(stop)
        return TextDelta("".join(parts), len(starts), stop, tuple(starts))

    def _look_in(self, text: str, may_stop: bool) -> tuple[int, str] | None:
        """Append `text`. Returns where the text before a stop string ends, and that stop string."""
        before = self._num_chars
        self._num_chars += len(text)
        self._held += text
        self._state, end, stop = self._scan(self._state, text, may_stop)
        found = None if stop is None else (before + end - len(stop), stop)
        if self._raw_state is None:
            return found
        self._raw_state, raw_end, raw_stop = self._scan(self._raw_state, text, may_stop)
        if raw_stop is not None:
            raw_found = (self._chars_before(before + raw_end, len(raw_stop)), raw_stop)
            if found is None or (raw_end, raw_found[0], -len(raw_stop)) < (end, found[0], -len(found[1])):
                return raw_found
        self._merge_states()
        return found

    def _look_in_hidden(self, text: str, may_stop: bool) -> tuple[int, str] | None:
        """The same for the text of a special token that is not shown."""
        state = self._state if self._raw_state is None else self._raw_state
        self._raw_state, end, stop = self._scan(state, text, may_stop)
        if stop is not None:
            return self._chars_before(self._num_chars, max(0, len(stop) - end)), stop
        self._hidden.append((self._num_chars, len(text)))
        self._merge_states()
        return None

    def _scan(self, state: int, text: str, may_stop: bool) -> tuple[int, int, str | None]:
        automaton = self._automaton
        assert automaton is not None
        end = 0
        while end < len(text):
            state, num_read = automaton.scan(state, text[end:] if end else text)
            end += num_read
            if may_stop and (stop := automaton.stop[state]) is not None:
                return state, end, stop
        return state, end, None

    def _merge_states(self) -> None:
        """One state is enough again once it is the same and no hidden character is part of it."""
        automaton = self._automaton
        assert automaton is not None
        num_shown_since = self._num_chars - self._hidden[-1][0]
        if self._raw_state == self._state and automaton.depth[self._state] <= num_shown_since:
            self._raw_state = None
            self._hidden.clear()

    def _chars_before(self, num_chars: int, length: int) -> int:
        """Characters shown before the last `length` ones of the text that begins with `num_chars` shown ones."""
        for position, hidden in reversed(self._hidden):
            if length <= num_chars - position:
                break
            length -= num_chars - position
            num_chars = position
            if length <= hidden:
                return num_chars
            length -= hidden
        return num_chars - length

    def _take_decided(self) -> str:
        """What no stop string can begin in any more."""
        automaton = self._automaton
        assert automaton is not None
        keep = automaton.pending[self._state]
        if self._raw_state is not None:
            keep = max(keep, self._num_chars - self._chars_before(self._num_chars, automaton.pending[self._raw_state]))
        if keep == 0:
            text, self._held = self._held, ""
        else:
            text, self._held = self._held[:-keep], self._held[-keep:]
        return text

    def _decode_end(self) -> str:
        return "" if self._read == self._read_first else self._decode(b"", True)

    def _decode(self, data: bytes, is_last: bool = False) -> str:
        if self._pending:
            data = self._pending + data
        text, num_used = utf_8_decode(data, "replace", is_last)
        self._pending = data[num_used:]
        if self._strips_space and text:
            self._strips_space = False
            return text[1:] if text[0] == " " else text
        return text

    def _read_first(self, token_id: int) -> bytes:
        """The bytes of a token while nothing has been shown."""
        data = self._reader.read(token_id)
        if data:
            self._read = self._table.__getitem__ if self._reader.is_plain else self._reader.read
            if not 0x80 <= data[0] < 0xC0:
                self._pending = b""  # what the prompt left unfinished is the prompt's
        return data

    def _unfinished_character(self, token_ids: Sequence[int]) -> bytes:
        """The first bytes of a character, if the prompt ends within one."""
        tail = b""
        for token_id in reversed(token_ids):
            tail = self._table[token_id] + tail
            if len(tail) >= 4:
                break
        return tail[utf_8_decode(tail, "replace", False)[1] :]
