"""The stack coder of the compact codec: an asymmetric numeral system with a 64-bit state.

The writer works backwards and pushes; the reader works forwards and pops. The state stays in
[2^32, 2^64) between operations; 32-bit words move between it and the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightwire.errors import CorruptStream
from weightwire.kernels.contract import PROBABILITY_BITS, PROBABILITY_SUM

LOW = 1 << 32
"""The state's lower bound, its first value when writing and its last when reading."""

_WORD = LOW - 1
_SLOT = PROBABILITY_SUM - 1


class Writer:
    """Takes symbols in reverse; ``words`` gives the finished stream in reading order."""

    def __init__(self) -> None:
        self._state = LOW
        self._words: list[int] = []

    def push_symbol(self, start: int, frequency: int) -> None:
        """Code a symbol that owns the slots [start, start + frequency)."""
        self._spill(frequency << (64 - PROBABILITY_BITS))
        quotient, remainder = divmod(self._state, frequency)
        self._state = (quotient << PROBABILITY_BITS) + remainder + start

    def push_raw(self, value: int, n_bits: int) -> None:
        """Code up to 62 raw bits, sixteen at a time, the lowest last."""
        for shift in reversed(range(0, n_bits, 16)):
            width = min(16, n_bits - shift)
            self._spill(1 << (64 - width))
            self._state = self._state << width | (value >> shift & ((1 << width) - 1))

    def borrow(self, n_bits: int) -> int:
        """Take bits off the stack: they choose where inside its interval an element is hit."""
        value = self._state & ((1 << n_bits) - 1)
        self._state >>= n_bits
        return value

    def push_gap(self, start: int, frequency: int, low_bits: int, shift: int) -> None:
        """Code a gap's last quotient symbol and its raw bits; follows ``borrow``."""
        self._spill(frequency << (64 - PROBABILITY_BITS - shift))
        self._state = self._state << shift | low_bits
        quotient, remainder = divmod(self._state, frequency)
        self._state = (quotient << PROBABILITY_BITS) + remainder + start

    def words(self) -> list[int]:
        """The state's two words, low first, then the stream."""
        return [self._state & _WORD, self._state >> 32, *reversed(self._words)]

    def _spill(self, bound: int) -> None:
        if self._state >= bound:
            self._words.append(self._state & _WORD)
            self._state >>= 32


class Reader:
    """Mirrors ``Writer``, last operation first."""

    def __init__(self, words: Sequence[int], first: int, stop: int) -> None:
        if stop - first < 2:
            raise CorruptStream("stream is shorter than the coder's state")
        self._words = words
        self._stop = stop
        self._state = words[first] | words[first + 1] << 32
        self.position = first + 2
        if self._state < LOW:
            raise CorruptStream("stream starts with a state out of range")

    def pop_symbol(self, cumulative: Sequence[int]) -> int:
        """The symbol whose slots hold the state's low bits."""
        symbol = self._take_symbol(cumulative)
        self._refill(LOW)
        return symbol

    def pop_raw(self, n_bits: int) -> int:
        """Up to 62 raw bits."""
        value = 0
        for shift in range(0, n_bits, 16):
            width = min(16, n_bits - shift)
            value |= (self._state & ((1 << width) - 1)) << shift
            self._state >>= width
            self._refill(LOW)
        return value

    def pop_gap(self, cumulative: Sequence[int], again: int, shift: int) -> int:
        """A whole gap; the state is left below its bound until ``give_back``."""
        quotient = 0
        while (symbol := self._take_symbol(cumulative)) == again:
            quotient += again
            self._refill(LOW)
        low_bits = self._state & ((1 << shift) - 1)
        self._state >>= shift
        return (quotient + symbol) << shift | low_bits

    def give_back(self, value: int, n_bits: int) -> None:
        """Return the bits that ``Writer.borrow`` took."""
        self._refill(LOW >> n_bits)
        self._state = self._state << n_bits | value

    def finish(self, stop: int) -> None:
        """Check that the stream ends exactly here, in the state it was begun with."""
        if self.position != stop or self._state != LOW:
            raise CorruptStream("stream does not end where it must")

    def _take_symbol(self, cumulative: Sequence[int]) -> int:
        slot = self._state & _SLOT
        symbol = 0
        while cumulative[symbol + 1] <= slot:
            symbol += 1
        frequency = cumulative[symbol + 1] - cumulative[symbol]
        self._state = frequency * (self._state >> PROBABILITY_BITS) + slot - cumulative[symbol]
        return symbol

    def _refill(self, bound: int) -> None:
        if self._state < bound:
            if self.position >= self._stop:
                raise CorruptStream("stream ends in the middle of a symbol")
            self._state = self._state << 32 | self._words[self.position]
            self.position += 1
