"""The border to stores: whatever comes out of one is its answer or its failure, never the end of the instance.

A client library may raise anything, and answer less than it was asked. That is a bug, of theirs or of ours, so it is logged
with its traceback; but it costs what a store that is down costs, which is the reuse of what lies there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from baton.kv.store import BadStore, StoreFailed

log = logging.getLogger("baton.store")

T = TypeVar("T")


class StoreGuard:
    def __init__(self) -> None:
        self._logged: set[type[Exception]] = set()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Raises BadStore and StoreFailed, and nothing else."""
        try:
            yield
        except (BadStore, StoreFailed):
            raise
        except Exception as error:  # broad: code of others has no list of what it may raise
            news = type(error) not in self._logged
            self._logged.add(type(error))
            # The traceback once for each kind: a library that errs does so at every call.
            log.log(
                logging.ERROR if news else logging.DEBUG, "the store erred, and that counts as its failure", exc_info=True
            )
            raise StoreFailed(f"{type(error).__name__}: {error}") from error

    def asked(self, call: Callable[[], list[T]], names: Sequence[str]) -> list[T]:
        """One answer for each name."""
        with self.guarded():
            answers = call()
        if len(answers) != len(names):
            raise StoreFailed(f"the store answers for {len(answers)} of {len(names)} objects")
        return answers
