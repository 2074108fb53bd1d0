"""Settings of the HTTP surface: one frozen value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from baton.api.auth import why_not_keys
from baton.api.parsers.choosing import ReasoningParserChoice, ToolParserChoice
from baton.api.sampling_defaults import SamplingDefaults
from baton.core.errors import SetupError


class BadApiSettings(SetupError):
    """An invalid setting of the HTTP API."""


@dataclass(frozen=True, slots=True)
class ApiSettings:
    served_model_names: tuple[str, ...]
    """The first is shown in answers; a request may use any of them."""
    api_keys: tuple[str, ...] = ()
    """Empty: no authentication, one tenant. Keys written `GROUP:KEY` share KV within the group."""
    metrics_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys that open `/metrics`; empty: every API key does."""
    body_bytes_max: int = 4 << 20
    chat_template: str | Path | None = None
    """Overrides the model's own: a path to a template, or the template itself."""
    model_sampling: SamplingDefaults | None = None
    """In place of the model's generation_config.json; None: that."""
    default_sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Overrides the model's defaults."""
    tool_parser: ToolParserChoice = ToolParserChoice.AUTO
    reasoning_parser: ReasoningParserChoice = ReasoningParserChoice.AUTO
    allowed_origins: tuple[str, ...] = ()
    """Origins that browsers may call from (CORS); none by default."""
    special_tokens_in_prompts: bool = True
    """Whether the text of a control token in a prompt is that token. In chats, what a client writes never is."""
    request_cost_max: int = 2 << 20
    """Most units (choices × answer tokens × (1 + log-probabilities)) of one request."""
    key_cost_max: int = 64 << 20
    """Most units that one tenant has open."""
    key_share: float = 0.75
    """With several keys: the share of the slots that one of them may hold."""

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise BadApiSettings("served_model_names needs at least one name, and no empty one")
        reason = why_not_keys(self.api_keys)
        if reason is not None:
            raise BadApiSettings(reason)
        if any(key.split() != [key] for key in self.metrics_keys):
            raise BadApiSettings("the metrics key is empty or has white space in it")
        if self.body_bytes_max < 1:
            raise BadApiSettings("body_bytes_max must be at least 1")
        if min(self.request_cost_max, self.key_cost_max) < 1 or not 0 < self.key_share <= 1:
            raise BadApiSettings("costs must be at least 1, and key_share more than 0 and at most 1")
