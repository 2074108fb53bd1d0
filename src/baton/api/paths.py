"""The paths that generate, and the dialect of each."""

from __future__ import annotations

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"
COUNT_TOKENS_PATH = "/v1/messages/count_tokens"
GENERATING_PATHS = (CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH, MESSAGES_PATH)


def speaks_messages(path: str) -> bool:
    """Whether errors at this path have the shape of Anthropic's Messages API instead of OpenAI's."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
