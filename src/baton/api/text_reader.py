"""Turns one choice's tokens into text: detokenises, finds stop strings, cuts at the end of the answer.

Owns the counts that usage is made of. Promises that text, tokens and log-probabilities of a choice end together: at
the token that completed a stop string, at a stop token (kept and counted, its text not shown), or where the engine
ended it. Does not know HTTP nor which engine it reads from.

An attempt that ends with RESCHEDULE may be continued on another instance. The text of its last burst and the text held back
(half a character, the beginning of a stop string) are not sent; the continuation has them in the token ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from baton.api.detokenise import Detokenizer
from baton.api.engine import StreamEnd, TokenBurst
from baton.api.logprob_columns import TokenLogprob
from baton.api.parsers.parts import AnswerParser, AnswerPart, CallBegun
from baton.api.prompt_logprobs import PromptTable
from baton.api.reasoning_tokens import ReasoningCounter
from baton.api.stop_strings import StopScanner
from baton.api.tracing.stage_notes import ChoiceHistory
from baton.core.engine.ended import Bill
from baton.core.engine.request import FinishReason
from baton.core.errors import InvariantViolated
from baton.core.handover.faults import PdFault


@dataclass(frozen=True, slots=True)
class RescheduledAttempt:
    """An attempt that ended before its answer: the fault, and all generated tokens, including those already sent as text."""

    fault: PdFault
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The addition of one burst to a choice. `finish` is set on the last one."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: Sequence[TokenLogprob]
    offsets: tuple[int, ...]
    """Text offset of each token; one per entry of `logprobs`."""
    finish: FinishReason | None
    first: bool
    """Whether this is the first delta of its choice."""
    rescheduled: RescheduledAttempt | None = None
    """Set with the finish reason RESCHEDULE; the text is empty then."""
    parts: Sequence[AnswerPart] | None = None
    """What the text is made of, where that is asked for; text that may still become a marker is not in it."""
    has_calls: bool = False
    """Whether the choice has a tool call so far, that no stop string has cut."""
    stop_string: str | None = None
    """The one that ended the choice."""


class ChoiceReader:
    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        scanner: StopScanner | None,
        stop_ids: Container[int],
        min_tokens: int = 0,
        text_offset: int = 0,
        parser: AnswerParser | None = None,
        reasoning: ReasoningCounter | None = None,
        prompt: PromptTable | None = None,
        prompt_only: bool = False,
    ) -> None:
        """`prompt`: where log-probabilities of the prompt go, if this choice reports them. `prompt_only`: the answer has no
        token; the one that every request draws is dropped."""
        self.index = index
        self._prompt = prompt
        self._prompt_only = prompt_only
        self._reasoning = reasoning
        self.cached_tokens = 0
        self.bill: Bill | None = None
        """The bill; None until the engine has reported the end, which may be after the last text."""
        self.places: tuple[str, ...] = ()
        """Names of the instances that ran it, set with the bill."""
        self.history: ChoiceHistory | None = None
        """What was noted of it, for its trace; set with the bill."""
        self.finish: FinishReason | None = None
        self.stopped_by_string = False
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._offset = text_offset
        self._parser = parser
        """Finds the parts of the text; None: they are not asked for."""
        self._has_calls = False
        self._first = True
        self._ids = array("i")
        self._unsent = ""
        """Of a continued answer: text of delivered tokens that the client lacks."""
        self._skipped = 0
        """Of a continued answer: characters to come that the client already has."""

    @property
    def has_parts(self) -> bool:
        """Whether the text is taken apart."""
        return self._parser is not None

    @property
    def tokens(self) -> int:
        """Number of tokens of the answer."""
        return len(self._ids)

    @property
    def reasoning_tokens(self) -> int | None:
        """None: reasoning is not told from the rest."""
        return None if self._reasoning is None else self._reasoning.count

    @property
    def token_ids(self) -> list[int]:
        return self._ids.tolist()

    def read_prompt(self, burst: TokenBurst) -> bool:
        """Take in what a burst has of the prompt. Call before `read`; True: there is nothing else in it."""
        if self._prompt is not None:
            self._prompt.add(burst.prompt_logprobs)
        return bool(burst.prompt_logprobs) and not burst.tokens and burst.ended is None

    @property
    def lacks_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to come; none come after its first token."""
        return self._prompt is not None and not self._prompt.is_complete

    def read(self, burst: TokenBurst) -> TextDelta:
        if burst.cached_tokens is not None:
            self.cached_tokens = burst.cached_tokens
        if self._prompt_only:
            burst = _without_answer(burst)
        offsets: tuple[int, ...] = ()
        if self._scanner is None and not burst.logprobs:
            text, kept = self._detokenizer.push(self._shown(burst.tokens)), len(burst.tokens)
            self._offset += len(text)
        else:
            text, kept, offsets = self._read_each(burst)
        tokens, rescheduled = burst.tokens[:kept], None
        self._ids.extend(tokens)
        if self._reasoning is not None:
            self._reasoning.push(tokens)
        if self.stopped_by_string:
            self.finish = FinishReason.STOP
        elif burst.ended is not None:
            self.finish, self.cached_tokens = burst.ended.reason, burst.ended.cached_tokens
            rescheduled = self._rescheduled(burst.ended)
            text = text + self._flush() if rescheduled is None else ""
        return self._delta(text, tokens, burst.logprobs[:kept], offsets, rescheduled)

    def continue_after(self, tokens: tuple[int, ...], sent: int | None) -> int:
        """Begin after tokens that another instance generated, of whose text the client has `sent` characters.

        None: all that these tokens settle, which is what would have been sent here. Call before `read`. Returns the
        number of characters settled. Where the tokens complete a stop string, the next `read` ends the choice.
        """
        parser, self._parser = self._parser, None
        shown = self.read(TokenBurst(tokens, (), None)).text
        self.finish, self._first, self._parser = None, not tokens, parser
        if sent is not None:
            self._unsent, self._skipped = shown[sent:], max(0, sent - len(shown))
        if parser is not None:
            self._push(parser, shown[:sent])
        return len(shown)

    def cancel(self) -> TextDelta:
        """End the choice as cancelled; the delta has the text held back."""
        self.finish = FinishReason.ABORT
        return self._delta(self._flush(), (), (), ())

    def _rescheduled(self, ended: StreamEnd) -> RescheduledAttempt | None:
        if ended.reason is not FinishReason.RESCHEDULE:
            return None
        if ended.fault is None:
            raise InvariantViolated(f"choice {self.index} is to go on elsewhere, but the engine does not say why")
        return RescheduledAttempt(ended.fault, self.token_ids)

    def _delta(
        self,
        text: str,
        tokens: tuple[int, ...],
        logprobs: Sequence[TokenLogprob],
        offsets: tuple[int, ...],
        rescheduled: RescheduledAttempt | None = None,
    ) -> TextDelta:
        first, self._first = self._first, False
        if rescheduled is None and (self._unsent or self._skipped):
            text = self._without_sent(text)
        parts = None if self._parser is None else self._push(self._parser, text, rescheduled is None)
        has_calls = self._has_calls and not self.stopped_by_string
        return TextDelta(
            self.index, text, tokens, logprobs, offsets, self.finish, first, rescheduled, parts, has_calls, self._stop_string
        )  # fmt: skip

    @property
    def _stop_string(self) -> str | None:
        return None if self._scanner is None else self._scanner.matched

    def _push(self, parser: AnswerParser, text: str, may_end: bool = False) -> list[AnswerPart]:
        parts = parser.push(text)
        if may_end and self.finish is not None:
            parts = parts + parser.finish()
        self._has_calls = self._has_calls or any(isinstance(part, CallBegun) for part in parts)
        return parts

    def _without_sent(self, text: str) -> str:
        text, self._unsent = self._unsent + text, ""
        skipped = min(self._skipped, len(text))
        self._skipped -= skipped
        if self._parser is not None:
            self._push(self._parser, text[:skipped])
        return text[skipped:]

    def _shown(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens whose text is shown: without a final stop token."""
        return tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens

    def _read_each(self, burst: TokenBurst) -> tuple[str, int, tuple[int, ...]]:
        """Read token by token, to find the token that completed a stop string and the offset of each."""
        shown: list[str] = []
        offsets: list[int] = []
        for count, token in enumerate(burst.tokens, 1):
            offsets.append(self._offset)
            text = "" if token in self._stop_ids else self._detokenizer.push((token,))
            self._offset += len(text)
            shown.append(self._scan(text, self.tokens + count))
            if self.stopped_by_string:
                return "".join(shown), count, tuple(offsets)
        return "".join(shown), len(burst.tokens), tuple(offsets)

    def _scan(self, text: str, tokens: int) -> str:
        if self._scanner is None or tokens < self._min_tokens:
            return text
        shown = self._scanner.push(text)
        self.stopped_by_string = self._scanner.hit
        return shown

    def _flush(self) -> str:
        """The text held back at the end. A stop string completed by it still cuts the text; all tokens are counted."""
        tail = self._detokenizer.flush()
        if self._scanner is None:
            return tail
        shown = self._scan(tail, self.tokens)
        if self.stopped_by_string:
            self.finish = FinishReason.STOP
        return shown + self._scanner.flush()


def _without_answer(burst: TokenBurst) -> TokenBurst:
    ended = burst.ended
    if ended is not None and ended.reason is FinishReason.STOP:
        ended = replace(ended, reason=FinishReason.LENGTH)
    return replace(burst, tokens=(), logprobs=(), ended=ended)
