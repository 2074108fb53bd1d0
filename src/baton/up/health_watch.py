"""Decides whether a process that serves hangs, by its answers to `GET /health`. Has no clock, process or socket.

A process is asked every ASK_US. It hangs where no good answer has come for HUNG_US, several questions in a row went without
one, and the system says that it does not run: it is stopped, or its threads all wait. One that runs is busy, and has
HUNG_RUNNING_US. Time in which the asker itself stood still does not count.
"""

from __future__ import annotations

ASK_US = 1_000_000
"""Pause between two questions."""
ANSWER_US = 3_000_000
"""Longest wait for an answer."""
HUNG_US = 10_000_000
HUNG_RUNNING_US = 60_000_000
UNANSWERED_MIN = 3


class HealthWatch:
    def __init__(self, now_us: int) -> None:
        self._good_us = self._asked_us = now_us
        self._unanswered = 0

    @property
    def unhealthy_us(self) -> int:
        """Time from the last good answer to the last question."""
        return self._asked_us - self._good_us

    def answered(self, is_good: bool, runs: bool, now_us: int) -> bool:
        """Take in the outcome of a question; True when the process hangs. `runs`: it uses a CPU or waits for one."""
        late_us = max(0, now_us - self._asked_us - ASK_US - ANSWER_US)
        self._asked_us = now_us
        if is_good:
            self._good_us, self._unanswered = now_us, 0
            return False
        self._good_us += late_us
        self._unanswered += 1
        limit_us = HUNG_RUNNING_US if runs else HUNG_US
        return now_us - self._good_us >= limit_us and self._unanswered >= UNANSWERED_MIN
