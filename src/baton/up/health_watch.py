"""Decides whether a process that serves hangs, by its answers to `GET /health`. Has no clock, process or socket.

A process is asked every ASK_US. Where no good answer has come for HUNG_US, and several questions in a row went without one,
it hangs: a busy process answers late, a stopped or deadlocked one never. Time in which the asker itself stood still does not
count.
"""

from __future__ import annotations

ASK_US = 1_000_000
"""Pause between two questions."""
ANSWER_US = 2_000_000
"""Longest wait for an answer."""
HUNG_US = 10_000_000
UNANSWERED_MIN = 3


class HealthWatch:
    def __init__(self, now_us: int) -> None:
        self._good_us = self._asked_us = now_us
        self._unanswered = 0

    def answered(self, is_good: bool, now_us: int) -> bool:
        """Take in the outcome of a question; True when the process hangs."""
        late_us = max(0, now_us - self._asked_us - ASK_US - ANSWER_US)
        self._asked_us = now_us
        if is_good:
            self._good_us, self._unanswered = now_us, 0
            return False
        self._good_us += late_us
        self._unanswered += 1
        return now_us - self._good_us >= HUNG_US and self._unanswered >= UNANSWERED_MIN
