"""The model's own text: tokenizer, chat template, end-of-text ids and default sampling, loaded from a model folder.

Owns every call into `tokenizers` and the template engine. Safe to use from several threads: it goes to the Rust
tokenizer directly, which is not changed after loading (the wrapper of `transformers` sets truncation on each call).
Nothing is fetched: the folder has it, or loading fails. Templates run in the sandbox of `transformers`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jinja2
from tokenizers import Tokenizer

from baton.api.detokenise import ByteDetokenizer, Detokenizer, WindowDetokenizer, pieces_of
from baton.core.errors import BatonError

TEMPLATE_RESERVED = frozenset(
    [
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "dict",
        "documents",
        "messages",
        "namespace",
        "raise_exception",
        "return_assistant_tokens_mask",
        "strftime_now",
        "tokenize",
        "tools",
    ]
)
"""Names that `chat_template_kwargs` may not set: they are ours or the template engine's."""


T = TypeVar("T")


def first_given(*values: T | None) -> T | None:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


class ModelTextError(BatonError):
    """The folder does not hold what is needed to turn text into tokens."""


class TemplateRefused(BatonError):
    """The chat template does not accept these messages; the message says why."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults for fields absent from a request. None: the neutral value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def over(self, other: SamplingDefaults) -> SamplingDefaults:
        """These values, completed by `other` where they are None."""
        return SamplingDefaults(
            temperature=first_given(self.temperature, other.temperature),
            top_p=first_given(self.top_p, other.top_p),
            top_k=first_given(self.top_k, other.top_k),
            min_p=first_given(self.min_p, other.min_p),
            repetition_penalty=first_given(self.repetition_penalty, other.repetition_penalty),
        )


class ModelText:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        defaults: SamplingDefaults | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._pieces = pieces_of(tokenizer)
        self._special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = chat_template
        self.eos_ids = frozenset(eos_ids)
        self.defaults = defaults or SamplingDefaults()

    def with_template(self, template: str | Path) -> ModelText:
        text = read_template(template)
        return ModelText(
            self._tokenizer,
            chat_template=text,
            special_tokens=self._special_tokens,
            eos_ids=self.eos_ids,
            defaults=self.defaults,
        )

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the tokenizer; the model may have more."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # As a batch of one: only then do the other threads of this process run meanwhile, and a long text takes seconds.
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of a whole sequence, equal to the concatenated stream."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(self, context: Sequence[int] = (), skip_special: bool = True) -> Detokenizer:
        """A new detokenizer. `context` precedes the text: it decides about a leading space and is not part of the output."""
        hidden = self._special if skip_special else frozenset[int]()
        if self._pieces is None:
            return WindowDetokenizer(self._decode_raw, hidden, context)
        return ByteDetokenizer(self._pieces, hidden, self._pieces.strips_first_space and not context)

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token, special ones too; not always a whole character."""
        if self._pieces is not None:
            return self._pieces(token_id)
        return self._decode_raw([token_id]).encode()

    def token(self, token_id: int) -> str:
        """The tokenizer's string for an id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool, extra: Mapping[str, object]
    ) -> str:
        if self._chat_template is None:
            raise TemplateRefused("this model has no chat template; use /v1/completions or set one")
        from transformers.utils.chat_template_utils import render_jinja_template

        variables: dict[str, Any] = {**self._special_tokens, **extra}  # free-form: defined by the template
        try:
            rendered: Sequence[object] = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self._chat_template,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )[0]
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A template is the model's code run on the client's data: what it cannot digest is the client's to change.
            raise TemplateRefused(f"the chat template refused the messages: {error}") from error
        return str(rendered[0])

    def _decode_raw(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def read_template(template: str | Path) -> str:
    """A path is read; a string is a path if it has no template syntax in it."""
    if isinstance(template, str) and ("{{" in template or "{%" in template):
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelTextError(f"the chat template {str(template)!r} cannot be read: {error}") from None


def load_text(folder: Path) -> ModelText:
    # Imported here, as in `render_chat`: it takes seconds, and whoever loads a text may first choose what comes along.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    wrapper = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if not isinstance(wrapper, PreTrainedTokenizerFast):
        raise ModelTextError(f"the tokenizer of {folder.name} has no tokenizer.json form; only those are served")
    generation = _read_json(folder / "generation_config.json")
    config = _read_json(folder / "config.json")
    eos = _ids(generation.get("eos_token_id")) | _ids(config.get("eos_token_id")) | _ids(wrapper.eos_token_id)
    template = wrapper.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    special = {name: str(token) for name, token in wrapper.special_tokens_map.items() if isinstance(token, str)}
    return ModelText(
        wrapper.backend_tokenizer,
        chat_template=template,
        special_tokens=special,
        eos_ids=eos,
        defaults=_defaults(generation),
    )


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def _defaults(generation: Mapping[str, object]) -> SamplingDefaults:
    def number(name: str, most: float = math.inf) -> float | None:
        """At most `most`, beyond which nothing changes."""
        value = generation.get(name)
        return min(float(value), most) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    top_k = number("top_k", 2**31 - 1)
    return SamplingDefaults(
        temperature=number("temperature"),
        top_p=number("top_p", 1),
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )
