"""The sampling defaults of a server: values for fields that a request leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


def first_given(*values: T | None) -> T | None:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults for fields absent from a request. None: the neutral value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """Length of an answer whose request names none, where the context has room for it."""

    def over(self, other: SamplingDefaults) -> SamplingDefaults:
        """These values, completed by `other` where they are None."""
        return SamplingDefaults(
            temperature=first_given(self.temperature, other.temperature),
            top_p=first_given(self.top_p, other.top_p),
            top_k=first_given(self.top_k, other.top_k),
            min_p=first_given(self.min_p, other.min_p),
            repetition_penalty=first_given(self.repetition_penalty, other.repetition_penalty),
            max_tokens=first_given(self.max_tokens, other.max_tokens),
        )
