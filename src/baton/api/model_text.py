"""The model's own text: tokenizer, chat template, end-of-text ids and default sampling, loaded from a model folder.

Owns every call into `tokenizers` and the template engine. Safe to use from several threads: it goes to the Rust
tokenizer directly, which is not changed after loading (the wrapper of `transformers` sets truncation on each call).
Nothing is fetched: the folder has it, or loading fails. Templates run in the sandbox of `transformers`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from tokenizers import Tokenizer

from baton.api.chat_template import read_template
from baton.api.control_tokens import ControlTokenInText, ControlTokens
from baton.api.detokenise import ByteDetokenizer, Detokenizer, WindowDetokenizer, pieces_of
from baton.api.sampling_defaults import SamplingDefaults
from baton.api.token_lengths import token_lengths
from baton.core.errors import BatonError, SetupError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATE_RESERVED = frozenset(
    [
        "add_generation_prompt",
        "additional_special_tokens",
        "bos_token",
        "chat_template",
        "cls_token",
        "continue_final_message",
        "conversations",
        "dict",
        "documents",
        "eos_token",
        "mask_token",
        "messages",
        "namespace",
        "pad_token",
        "raise_exception",
        "return_assistant_tokens_mask",
        "sep_token",
        "strftime_now",
        "tokenize",
        "tools",
        "unk_token",
    ]
)
"""Names that `chat_template_kwargs` may not set: they are ours, the template engine's or the tokenizer's."""


_ASKS_FOR_CONTENT = re.compile(r"content(?:['\"]\])? is (?:not )?none", re.IGNORECASE)


_CONTENT_END = "\ue0c0end-of-content\ue0c1"
"""Where the content of a message ends in a rendered chat. The last one counts, so that a client may write it too."""

REASON_CHARS_MAX = 300
"""Of what a library says about a file."""


class ChatEnding(Enum):
    """How the prompt of a chat ends."""

    GENERATION_PROMPT = auto()
    """With the beginning of an answer."""
    LAST_MESSAGE = auto()
    IN_CONTENT = auto()
    """With the content of the last message, which the answer goes on with."""


class ModelTextError(SetupError):
    """The folder does not hold what is needed to turn text into tokens; the message names the file."""


class TemplateRefused(BatonError):
    """The chat template does not accept these messages; the message says why."""


class TextTooLong(BatonError):
    """A text that has more tokens than are allowed, which its bytes tell: it was not encoded."""

    def __init__(self, least_tokens: int) -> None:
        super().__init__(f"the text has at least {least_tokens} tokens")
        self.least_tokens = least_tokens


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
        self._control = ControlTokens(tokenizer)
        self._lengths = token_lengths(tokenizer)
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
    def chat_template(self) -> str:
        """Empty where there is none."""
        return self._chat_template or ""

    @property
    def has_absent_contents(self) -> bool:
        """Whether the chat template tells messages without content from those with an empty one."""
        return _ASKS_FOR_CONTENT.search(self.chat_template) is not None

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the tokenizer; the model may have more."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Without `parse_special`, the text of a control token is text like any other."""
        if not parse_special:
            return self._control.encode_as_text(text, add_special_tokens)
        # As a batch of one: only then do the other threads of this process run meanwhile, and a long text takes seconds.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def check_length(self, texts: Iterable[str], tokens_max: int) -> None:
        """Raises TextTooLong when the texts together have more tokens for certain. Looks at their bytes only."""
        if self._lengths is not None and (least := self._lengths.least_tokens(texts)) > tokens_max:
            raise TextTooLong(least)

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, object]],
        ending: ChatEnding,
        extra: Mapping[str, object],
        tokens_max: int,
    ) -> list[int]:
        """The ids of a chat. Control tokens are those that the template writes; what a client spells is text."""
        if ending is ChatEnding.IN_CONTENT:
            messages = _with_marked_end(messages)
        chat = self._control.disguise(messages, extra, self.chat_template)
        if chat is None:
            rendered = self._rendered(messages, ending, extra)
            self.check_length([rendered], tokens_max)
            return self.encode(rendered, add_special_tokens=False)  # the template wrote them
        rendered = self._rendered(chat.messages, ending, chat.extra)
        self.check_length([rendered], tokens_max)
        try:
            return self._control.encode_rendered(rendered, chat)
        except ControlTokenInText as error:
            raise TemplateRefused(str(error)) from None

    def _rendered(self, messages: Sequence[Mapping[str, object]], ending: ChatEnding, extra: Mapping[str, object]) -> str:
        rendered = self.render_chat(messages, ending is ChatEnding.GENERATION_PROMPT, extra)
        if ending is not ChatEnding.IN_CONTENT:
            return rendered
        before, marker, _ = rendered.rpartition(_CONTENT_END)
        if not marker:
            raise TemplateRefused("the chat template leaves out the last message, so that it cannot be continued")
        return before

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of a whole sequence, equal to the concatenated stream."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(
        self, context: Sequence[int] = (), skip_special: bool = True, shown: Collection[str] = ()
    ) -> Detokenizer:
        """A new detokenizer. `context` precedes the text: it decides about a leading space and is not part of the output.

        `shown`: control tokens that are not skipped.
        """
        hidden = self._special if skip_special else frozenset[int]()
        if shown:
            hidden = frozenset(i for i in hidden if self.token(i) not in shown)
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
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool, extra: Mapping[str, object]
    ) -> str:
        if self._chat_template is None:
            raise TemplateRefused("this model has no chat template; use /v1/completions or set one")
        from transformers.utils.chat_template_utils import render_jinja_template

        if named := sorted(self._special_tokens.keys() & extra.keys()):  # a tokenizer may name more than the usual tokens
            raise TemplateRefused(f"'chat_template_kwargs' may not set {named[0]!r}, which is the tokenizer's")
        variables: dict[str, Any] = {**self._special_tokens, **extra}  # free-form: defined by the template
        try:
            rendered: Sequence[object] = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self._chat_template,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )[0]
        except (
            jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
        ) as error:  # fmt: skip
            # A template is the model's code run on the client's data: what it cannot digest is the client's to change.
            raise TemplateRefused(f"the chat template refused the messages: {error}") from error
        return str(rendered[0])

    def _decode_raw(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _with_marked_end(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}{_CONTENT_END}"}]


def load_text(folder: Path) -> ModelText:
    """Raises ModelTextError where the folder has no usable tokenizer."""
    wrapper = _wrapper(folder)
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


def _wrapper(folder: Path) -> PreTrainedTokenizerFast:
    # Imported here, as in `render_chat`: it takes seconds, and whoever loads a text may first choose what comes along.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        wrapper = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # What the library raises over a strange folder is as many-fold as the strangeness, and names no file.
        _check_files(folder)
        raise ModelTextError(f"the tokenizer of {folder} cannot be loaded: {_first_line(error)}") from error
    if not isinstance(wrapper, PreTrainedTokenizerFast):
        raise ModelTextError(f"the tokenizer of {folder} has no tokenizer.json form; only those are served")
    return wrapper


def _check_files(folder: Path) -> None:
    """Raises ModelTextError for the first file of a tokenizer that is broken by itself."""
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            Tokenizer.from_file(str(file))
        except Exception as flaw:  # the library raises nothing narrower
            raise ModelTextError(f"{file} is no usable tokenizer ({_first_line(flaw)}); download it again") from flaw
    for name in ("config.json", "tokenizer_config.json"):
        _read_json(folder / name)


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text[:REASON_CHARS_MAX] or type(error).__name__


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelTextError(f"{path} is no usable JSON file ({_first_line(error)}); download it again") from None
    return content if isinstance(content, dict) else {}


def _ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def _defaults(generation: Mapping[str, object]) -> SamplingDefaults:
    def number(name: str, most: float = math.inf) -> float | None:
        """At most `most`, beyond which nothing changes."""
        value = generation.get(name)
        return min(float(value), most) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    top_k, length = number("top_k", 2**31 - 1), number("max_new_tokens", 2**31 - 1)
    return SamplingDefaults(
        temperature=number("temperature"),
        top_p=number("top_p", 1),
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
        max_tokens=None if length is None or length < 1 else int(length),
    )
