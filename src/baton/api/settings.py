"""Settings of the HTTP surface: one frozen value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from baton.api.auth import why_not_keys
from baton.api.model_text import SamplingDefaults
from baton.core.errors import BatonError


class BadApiSettings(BatonError):
    """An invalid setting of the HTTP API."""


@dataclass(frozen=True, slots=True)
class ApiSettings:
    served_model_names: tuple[str, ...]
    """The first is shown in answers; a request may use any of them."""
    api_keys: tuple[str, ...] = ()
    """Empty: no authentication, one tenant. Keys written `GROUP:KEY` share KV within the group."""
    body_bytes_max: int = 4 << 20
    chat_template: str | Path | None = None
    """Overrides the model's own: a path to a template, or the template itself."""
    default_sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Overrides the model's generation_config.json."""
    allowed_origins: tuple[str, ...] = ()
    """Origins that browsers may call from (CORS); none by default."""

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise BadApiSettings("served_model_names needs at least one name, and no empty one")
        reason = why_not_keys(self.api_keys)
        if reason is not None:
            raise BadApiSettings(reason)
        if self.body_bytes_max < 1:
            raise BadApiSettings("body_bytes_max must be at least 1")
