"""What is fuzzed: a border is a decoder of bytes that strangers write, the errors it may answer with, and inputs for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Border:
    decode: Callable[[bytes], object]
    """Takes any bytes. Whatever it returns is an answer; whatever it raises beside `refusals` is a bug."""
    refusals: tuple[type[BaseException], ...]
    draw: Callable[[random.Random], bytes]
    """The next input: mostly a valid message with some harm done to it."""


MakeBorder = Callable[[], Border]
"""Builds a border. It imports what it needs itself, so that a process loads the code of one border only."""
