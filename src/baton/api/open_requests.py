"""The requests that are open now, so that a client can cancel its own by id.

An id is in use from before the engine is asked until the answer has ended. Each tenant has its own ids: it can neither
see nor cancel another's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from baton.api.choice_streams import ChoiceStreams
from baton.api.errors import ApiError
from baton.api.submissions import RequestOwner

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def is_sane_id(text: str) -> bool:
    return _SANE_ID.fullmatch(text) is not None


class OpenRequests:
    def __init__(self) -> None:
        self._open: dict[RequestOwner, ChoiceStreams] = {}

    def claim(self, asker: RequestOwner, answer: ChoiceStreams) -> None:
        self.check_free(asker)
        self._open[asker] = answer

    def check_free(self, asker: RequestOwner) -> None:
        if asker in self._open:
            message = f"The request id '{asker.request_id}' is in use"
            raise ApiError(409, message, param="X-Request-Id", code="duplicate_id")

    def check_unread(self, asker: RequestOwner) -> None:
        """Raises when an answer with this id is being read; checked before a stream is resumed."""
        if asker in self._open:
            message = (
                f"The answer '{asker.request_id}' is still being read by another connection; resume once that is closed"
            )
            raise ApiError(409, message, param="id", code="still_read")

    def release(self, asker: RequestOwner) -> None:
        self._open.pop(asker, None)

    @contextmanager
    def released_on_error(self, asker: RequestOwner) -> Iterator[None]:
        """Release the id when the block raises; keep it claimed otherwise."""
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                self.release(asker)

    def cancel(self, asker: RequestOwner) -> bool:
        """False where no open request has that id."""
        answer = self._open.get(asker)
        if answer is None:
            return False
        answer.cancel()
        return True


def not_open(request_id: str) -> ApiError:
    return ApiError(404, f"No open request has the id '{request_id[:128]}'", param="id", code="not_found")
