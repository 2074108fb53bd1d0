"""Guards calls of a store: any exception becomes StoreFailed, so that a bug in a client library does not end the instance.

A client library may raise anything and return fewer results than asked for. That is logged with its traceback and treated
like a store that is down.
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
        """Lets BadStore and StoreFailed pass and turns every other exception into StoreFailed."""
        try:
            yield
        except (BadStore, StoreFailed):
            raise
        except Exception as error:  # broad: client libraries do not declare what they raise
            news = type(error) not in self._logged
            self._logged.add(type(error))
            # One traceback per exception type: a broken library raises at every call.
            log.log(
                logging.ERROR if news else logging.DEBUG, "the store erred, and that counts as its failure", exc_info=True
            )
            raise StoreFailed(f"{type(error).__name__}: {error}") from error

    def asked(self, call: Callable[[], list[T]], names: Sequence[str]) -> list[T]:
        """Call the store, which must return one result for each name."""
        with self.guarded():
            answers = call()
        if len(answers) != len(names):
            raise StoreFailed(f"the store answers for {len(answers)} of {len(names)} objects")
        return answers
