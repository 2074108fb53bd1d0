"""A worker process that builds grammars from what clients want and compiles them, one at a time.

Reads encoded `ConstraintJob`s from standard input and answers on standard output (`constraint_messages`). Ends when its
input ends, and with the process that started it. Memory beyond what the tokenizer needs is limited: an allocation that fails
ends the process. So does SIGPROF, where a job takes more CPU time than it may. The front end tells both from an answer.

llguidance recurses over the rules of a grammar. So jobs are worked on by a thread whose stack is smaller than that of the
threads that compile constraints to serve them: what passes here does not overflow there, whatever `ulimit -s` says.

Whoever asks for a constraint may wait for this process to start, so it imports little: no arrays, no HTTP, no validation.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from llguidance import LLMatcher
from tokenizers import Tokenizer

from baton.api.constraint_jobs import ConstraintJob, MaskJob, decode_job
from baton.api.constraints.schema_document import overlapping_patterns
from baton.api.constraints.wanted import ConstraintRefused
from baton.core.bounds import CONSTRAINT_CHARS_MAX
from baton.executor.constraints.constraint_error import ConstraintError
from baton.executor.constraints.llguidance_grammars import NAME, VERSION, compiled, matching_tokenizer, read_eos_ids
from baton.executor.constraints.mask_digest import mask_digest
from baton.node.constraint_messages import (
    FromWorker,
    GrammarCompiled,
    GrammarRefused,
    MaskComputed,
    WorkerReady,
    WorkerUnable,
    encoded,
    read_frame,
)
from baton.node.parent_process import die_with_parent
from baton.node.starting_share import full_share, lower_share

MEMORY_BYTES = 512 << 20
"""What compiling may take beside the tokenizer."""
STACK_BYTES = 4 << 20
"""Of the thread that compiles."""
OVERLAPPING = re.compile(r"patternProperty regexes /\^\(\?:(.*)\)\$/ and /\^\(\?:(.*)\)\$/ are not disjoint", re.DOTALL)
TRIED_TOKENS = 128
"""Tokens of an answer that are tried: a grammar may be short and its masks dear, or dearer with every token."""


class ConstraintChecker:
    """Builds and compiles what jobs ask for, with a model's own tokens."""

    def __init__(self, folder: Path) -> None:
        """Raises ConstraintError where llguidance cannot use the tokenizer of this folder."""
        read = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer = matching_tokenizer(read, 0, read_eos_ids(folder, read))
        added = read.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if self._tokenizer.is_special_token(i)}
        self._stops = bits_of(self._tokenizer.eos_tokens)
        texts = {text: i for text, i in read.get_vocab().items() if i not in added}
        self._orders = RankedTokens(texts, longest_first), RankedTokens(texts, strings_first)

    def answer(self, payload: bytes) -> GrammarCompiled | GrammarRefused | MaskComputed:
        try:
            job = decode_job(payload)
            if isinstance(job, MaskJob):
                return MaskComputed(self._digest(job))
            source = self._grammar(job)
        except ConstraintRefused as refusal:
            return GrammarRefused(refusal.field, str(refusal))
        except (ValueError, RecursionError) as error:
            return GrammarRefused(None, f"The constraint cannot be read: {error}")
        if source is None:
            return GrammarCompiled("")
        if len(source) > CONSTRAINT_CHARS_MAX:
            return GrammarRefused(
                job.field or None, f"The constraint is too large: its grammar has {len(source)} characters"
            )
        try:
            self.begin_answer(source, TRIED_TOKENS)
        except ConstraintError as error:
            return GrammarRefused(job.field or None, f"The constraint cannot be enforced: {reason_of(error, job)}")
        return GrammarCompiled(source)

    def _digest(self, job: MaskJob) -> bytes:
        if (job.backend, job.version) != (NAME, VERSION):
            return b""
        try:
            matcher = compiled(self._tokenizer, job.source)
        except ConstraintError:
            return b""
        if matcher.try_consume_tokens(list(job.outputs)) != len(job.outputs) or matcher.is_error():
            return b""
        mask = self._stops if matcher.is_stopped() else matcher.compute_bitmask()
        return b"" if matcher.is_error() else mask_digest(mask)

    def _grammar(self, job: ConstraintJob) -> str | None:
        """Raises a ValueError for what nobody thought of: a client's text ends no process. Too little memory does."""
        try:
            return job.grammar(self._special)
        except (ConstraintRefused, MemoryError):
            raise
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def begin_answer(self, source: str, tokens: int) -> None:
        """Compile it and begin two answers. One always takes the longest token: what a parser holds grows with the text.
        The other opens and closes strings, and so comes to where many names may stand. Raises ConstraintError."""
        beginning = compiled(self._tokenizer, source)
        for order in self._orders:
            self._begin_in(order, beginning.deep_copy(), tokens)

    def _begin_in(self, order: RankedTokens, matcher: LLMatcher, tokens: int) -> None:
        for _ in range(tokens):
            if matcher.is_stopped():
                break
            mask = matcher.compute_bitmask()
            if matcher.is_error() or not matcher.try_consume_tokens([order.first_in(mask)]):
                break
        if matcher.is_error():
            raise ConstraintError(matcher.get_error())


def reason_of(error: ConstraintError, job: ConstraintJob) -> str:
    """What a client is told."""
    reason = str(error).partition("\n")[0]  # what follows describes the parser
    if "Current row has" in reason:
        return "too many alternatives may come next at one place of an answer"
    if found := OVERLAPPING.search(reason):
        place = overlapping_patterns([job.value, *(tool.parameters for tool in job.tools)], found.groups())
        at, patterns = ("", []) if place is None else place
        where = f" at {at[at.index('/', 1) :]}" if at else ""  # without the number of the schema
        return f"'patternProperties'{where}: a name may match two patterns {', '.join(map(repr, patterns))}".rstrip()
    return reason


def bits_of(tokens: Iterable[int]) -> bytes:
    """A mask that allows exactly these tokens."""
    allowed = sum(1 << token for token in set(tokens))
    return allowed.to_bytes(-(-allowed.bit_length() // 8), "little")


def longest_first(text: str) -> tuple[int, int]:
    return 0, -len(text)


def strings_first(text: str) -> tuple[int, int]:
    """What opens or closes a string, then what else stands between values, the shortest first; then other texts, the longest
    first, and last what closes an object or a list."""
    if any(sign in text for sign in ("}", "]", "\\")):
        return 3, -len(text)
    if '"' in text:
        return 0, len(text)
    return (1, len(text)) if any(sign in text for sign in ",:[{") else (2, -len(text))


class RankedTokens:
    """Finds the first in an order of the tokens that a mask allows. Each rank has the mask of its tokens, as one number."""

    def __init__(self, ids: Mapping[str, int], rank: Callable[[str], tuple[int, int]]) -> None:
        """`ids`: text → id, without tokens that stand for no text, as those that end an answer."""
        bits = max(ids.values(), default=0) // 8 + 1
        masks: dict[tuple[int, int], bytearray] = {}
        for text, token in ids.items():
            masks.setdefault(rank(text), bytearray(bits))[token >> 3] |= 1 << (token & 7)
        self._by_rank = [int.from_bytes(masks[at], "little") for at in sorted(masks)]

    def first_in(self, mask: bytes) -> int:
        """The first of the best rank; where none has a text, the first that is allowed, and 0 where none is."""
        allowed = int.from_bytes(mask, "little")
        found = next((both for of_rank in self._by_rank if (both := allowed & of_rank)), allowed)
        return max(0, (found & -found).bit_length() - 1)


def main() -> None:
    die_with_parent()
    _, folder, cpu_s, *options = sys.argv
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    if options:  # nobody waits for it yet
        lower_share()
    requests, answers = _pipes()
    try:
        checker = ConstraintChecker(Path(folder))
    except ConstraintError as error:
        _send(answers, WorkerUnable(str(error)))
        return
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(checker, requests, answers, float(cpu_s), bool(options)))
    thread.start()
    thread.join()


def _serve(checker: ConstraintChecker, requests: BinaryIO, answers: BinaryIO, cpu_s: float, was_early: bool) -> None:
    _limit_memory()
    if was_early:
        full_share()
    _send(answers, WorkerReady(NAME, VERSION))
    while (payload := read_frame(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = checker.answer(payload)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answers, answer)


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output. What a library prints goes to standard error instead, not between the messages."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sys.stdin.buffer, answers


def _send(answers: BinaryIO, message: FromWorker) -> None:
    answers.write(encoded(message))
    answers.flush()


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
