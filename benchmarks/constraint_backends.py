"""The child process of `constraints`: compiles schemas with one backend, walks their instances and writes an answer to each.

One line of JSON goes out for each schema, so that the parent knows which one a crash or a time-out belongs to. A schema goes
through the gate first unless the child is told to take it as it is; with llguidance it then goes the whole way to being
served: the limits of time, the trial and the limits of matchers are those of `baton serve`. Times are the least of three
fresh runs, so that other load on the machine falls out.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import jsonschema_rs
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from baton.api.constraint_jobs import ConstraintJob
from baton.api.constraints.lark_text import JSON_OPTIONS
from baton.api.constraints.schema_gate import checked_schema
from baton.api.constraints.wanted import ConstraintKind, ConstraintRefused
from baton.executor.constraints.constraint_error import ConstraintError
from baton.executor.constraints.llguidance_grammars import compiled, matching_tokenizer, parser_limits
from baton.node.constraint_messages import GrammarRefused
from baton.node.constraint_worker import ConstraintChecker
from baton.node.constraint_workers import CPU_S_MAX

TOKENS_MAX = 2_000
WALKED_CHARS_MAX = 20_000
SCHEMA_S_MAX = 10.0
"""After so many seconds of processor time with one schema the child is ended by a signal of its own, SIGPROF."""
RUNS = 3
LONG_US = 500_000
"""What takes longer to compile is compiled once."""
CLOSING = frozenset(b'"}]')

Schema = Any
Mask = npt.NDArray[np.bool_]


class Matcher(Protocol):
    def copy(self) -> Matcher: ...

    def mask(self) -> Mask: ...

    def take(self, token: int) -> bool: ...

    def may_end(self) -> bool: ...

    def has_failed(self) -> bool:
        """Whether it gave up, at a limit of its own."""
        ...


class Backend(Protocol):
    def gated(self, schema: Schema) -> Schema:
        """What the gate makes of a schema. Raises ConstraintRefused."""

    def check(self, schema: Schema) -> None:
        """What is asked of a schema beyond the gate before it is served. Raises NotCompiled."""

    def compile(self, schema: Schema) -> Matcher:
        """`schema`: as it is, or as the gate made it. Raises NotCompiled."""


class NotCompiled(Exception):
    """The message is the backend's."""


def _rewritten(schema: Schema) -> Schema:
    return checked_schema(schema, "schema").written()


class ServedBackend:
    """llguidance behind the gate, as `baton serve` uses it."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos: int) -> None:
        self._tokenizer = matching_tokenizer(Tokenizer.from_str(tokenizer.to_str()), vocabulary, [eos])
        self._vocabulary = vocabulary
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(f"{folder}/tokenizer.json")
            (Path(folder) / "config.json").write_text(json.dumps({"eos_token_id": eos}))
            self._checker = ConstraintChecker(Path(folder))

    def gated(self, schema: Schema) -> Schema:
        return _job(schema).grammar({})

    def check(self, schema: Schema) -> None:
        began_s = time.process_time()
        answer = self._checker.answer(_job(schema).encode())
        if isinstance(answer, GrammarRefused):
            raise NotCompiled(answer.message)
        if time.process_time() - began_s > CPU_S_MAX:
            raise NotCompiled(f"it takes more than {CPU_S_MAX:g} s of CPU time")

    def compile(self, schema: Schema) -> Matcher:
        try:
            return LlguidanceMatcher(compiled(self._tokenizer, schema), self._vocabulary)
        except ConstraintError as error:
            raise NotCompiled(str(error)) from error


def _job(schema: Schema) -> ConstraintJob:
    return ConstraintJob(ConstraintKind.JSON_SCHEMA, schema, "schema")


class LlguidanceBackend:
    """Without the gate."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos: int) -> None:
        import llguidance

        self._library = llguidance
        self._tokenizer = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=vocabulary, eos_token=eos)
        self._limits = parser_limits()
        self._vocabulary = vocabulary

    def gated(self, schema: Schema) -> Schema:
        return _rewritten(schema)

    def check(self, schema: Schema) -> None:
        """Nothing."""

    def compile(self, schema: Schema) -> Matcher:
        written = {**schema, "x-guidance": JSON_OPTIONS} if isinstance(schema, dict) else schema
        source = self._library.LLMatcher.grammar_from_json_schema(json.dumps(written))
        matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise NotCompiled(matcher.get_error().splitlines()[0])
        return LlguidanceMatcher(matcher, self._vocabulary)


class LlguidanceMatcher:
    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def copy(self) -> Matcher:
        return LlguidanceMatcher(self._matcher.deep_copy(), self._vocabulary)

    def mask(self) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(np.bool_)

    def take(self, token: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def has_failed(self) -> bool:
        return bool(self._matcher.is_error())


class XgrammarBackend:
    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos: int) -> None:
        import xgrammar

        self._library = xgrammar
        words: list[str] = [""] * vocabulary
        for word, token in tokenizer.get_vocab().items():
            words[token] = word
        kind = xgrammar.VocabType.BYTE_LEVEL
        info = xgrammar.TokenizerInfo(words, kind, vocab_size=vocabulary, stop_token_ids=[eos])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocabulary = vocabulary
        self._eos = eos

    def gated(self, schema: Schema) -> Schema:
        return _rewritten(schema)

    def check(self, schema: Schema) -> None:
        """Nothing."""

    def compile(self, schema: Schema) -> Matcher:
        try:
            compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, strict_mode=False)
        except (RuntimeError, ValueError) as error:
            raise NotCompiled(str(error).strip().splitlines()[-1]) from error
        return XgrammarMatcher(self._library, compiled, (), self._vocabulary, self._eos)


class XgrammarMatcher:
    def __init__(self, library: Any, compiled: Any, taken: Iterable[int], vocabulary: int, eos: int) -> None:
        self._library, self._compiled = library, compiled
        self._vocabulary, self._eos = vocabulary, eos
        self._matcher = library.GrammarMatcher(compiled)
        self._bitmask = library.allocate_token_bitmask(1, vocabulary)
        self._taken: list[int] = []
        for token in taken:
            self.take(token)

    def copy(self) -> Matcher:
        return XgrammarMatcher(self._library, self._compiled, self._taken, self._vocabulary, self._eos)

    def mask(self) -> Mask:
        self._matcher.fill_next_token_bitmask(self._bitmask)
        bits = self._bitmask.numpy().view(np.uint8).reshape(-1)
        found = np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(np.bool_)
        found[self._eos] = False
        return found

    def take(self, token: int) -> bool:
        is_taken = bool(self._matcher.accept_token(token))
        self._taken += [token] if is_taken else []
        return is_taken

    def may_end(self) -> bool:
        self._matcher.fill_next_token_bitmask(self._bitmask)
        bits = self._bitmask.numpy().view(np.uint8).reshape(-1)
        return bool(np.unpackbits(bits, bitorder="little")[self._eos])

    def has_failed(self) -> bool:
        return False


BACKENDS: dict[tuple[str, str], Callable[[Tokenizer, int, int], Backend]] = {
    ("llguidance", "gate"): ServedBackend,
    ("llguidance", "raw"): LlguidanceBackend,
    ("xgrammar", "gate"): XgrammarBackend,
    ("xgrammar", "raw"): XgrammarBackend,
}


class Walks:
    """Random answers that lean towards closing what is open."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos: int) -> None:
        pieces = [tokenizer.decode([token], skip_special_tokens=False).encode() for token in range(vocabulary)]
        self._pieces = pieces
        self._eos = eos
        self._closes = np.array([bool(piece) and piece[0] in CLOSING for piece in pieces], np.bool_)
        self._opens = np.array([any(char in b"[{" for char in piece) for piece in pieces], np.bool_)
        self._tokenizer = tokenizer

    def answer(self, matcher: Matcher, seed: int) -> list[int] | None:
        """Tokens of an answer that ended by itself; None: it did not within the limit."""
        chance = random.Random(seed)
        taken: list[int] = []
        while len(taken) < TOKENS_MAX:
            mask = matcher.mask()
            mask[self._eos] = False
            if matcher.may_end() and (not mask.any() or chance.random() < 0.9):
                return taken
            token = self._chosen(mask, chance)
            if token is None or not matcher.take(token):
                return None
            taken.append(token)
        return None

    def _chosen(self, mask: Mask, chance: random.Random) -> int | None:
        """Closing tokens more often than not; those that open another level rarely."""
        for preferred in (mask & self._closes, mask & ~self._opens):
            if preferred.any() and chance.random() < 0.8:
                return int(chance.choice(np.flatnonzero(preferred)))
        return int(chance.choice(np.flatnonzero(mask))) if mask.any() else None

    def text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


class SchemaRun:
    """Measures one schema."""

    def __init__(self, tokenizer: Tokenizer, matchers: list[Matcher], walks: Walks | None) -> None:
        self._tokenizer, self._matchers, self._walks = tokenizer, matchers, walks

    def measured(self, row: Schema, judge: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"wrong_accepts": 0, "wrong_rejects": 0, "valid": 0, "invalid": 0, "failed": 0}
        masks: list[float] = []
        for test in row["tests"]:
            is_valid = test["valid"]
            is_accepted, has_failed = self._accepts(test["data"], masks if is_valid else None)
            found["failed"] += has_failed
            found["valid" if is_valid else "invalid"] += 1
            found["wrong_accepts"] += is_accepted and not is_valid
            found["wrong_rejects"] += is_valid and not is_accepted
        if self._walks is not None:
            matcher = self._matchers[0].copy()
            tokens = self._walks.answer(matcher, seed=1)
            found["failed"] += matcher.has_failed()
            found["is_finished"] = tokens is not None
            found["is_invalid"] = tokens is not None and not satisfies(judge, self._walks.text(tokens))
        return found | {"mask_us": masks}

    def _accepts(self, data: object, masks: list[float] | None) -> tuple[bool, bool]:
        """Whether it is accepted, and whether the matcher gave up. The time of each mask is appended to `masks`."""
        text = json.dumps(data, ensure_ascii=False)[:WALKED_CHARS_MAX]
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        if masks is None:
            matcher = self._matchers[0].copy()
            return all(map(matcher.take, tokens)) and matcher.may_end(), matcher.has_failed()
        walks = [_walked(made.copy(), tokens) for made in self._matchers]
        masks += [min(times) for times in zip(*(times for times, _, __ in walks), strict=True)]
        return walks[0][1:]


def _walked(matcher: Matcher, tokens: list[int]) -> tuple[list[float], bool, bool]:
    """Microseconds of each mask, whether the tokens are accepted as a whole, and whether the matcher gave up."""
    times: list[float] = []
    for token in tokens:
        began = time.perf_counter()
        matcher.mask()
        times.append((time.perf_counter() - began) * 1e6)
        if not matcher.take(token):
            return times, False, matcher.has_failed()
    return times, matcher.may_end(), matcher.has_failed()


def judge_of(schema: dict[str, Any] | bool) -> Any:
    """None for a schema in a dialect of its own, whose answers cannot be judged."""
    try:
        return jsonschema_rs.validator_for(schema, validate_formats=True)
    except jsonschema_rs.ValidationError:
        return None


def satisfies(judge: Any, text: str) -> bool:
    try:
        return bool(judge.is_valid(json.loads(text)))
    except ValueError:
        return False


def measured(row: Schema, backend: Backend, tokenizer: Tokenizer, walks: Walks | None, has_gate: bool) -> dict[str, Any]:
    """What is found of one row: a schema with its instances."""
    schema, gate_us = row["schema"], 0.0
    began = time.perf_counter()
    if has_gate:
        try:
            schema = backend.gated(schema)
            gate_us = (time.perf_counter() - began) * 1e6
            backend.check(row["schema"])
        except ConstraintRefused as error:
            return {"refused": error.reason, "path": error.path}
        except NotCompiled as error:
            return {"not_compiled": str(error)[:200]}
    matchers, compile_us = [], []
    for _ in range(RUNS):
        began = time.perf_counter()
        try:
            matchers.append(backend.compile(schema))
        except NotCompiled as error:
            return {"not_compiled": str(error)[:200]}
        compile_us.append((time.perf_counter() - began) * 1e6)
        if compile_us[-1] > LONG_US:
            break
    judge = None if walks is None else judge_of(row["schema"])
    run = SchemaRun(tokenizer, matchers, None if judge is None else walks)
    return {"gate_us": gate_us, "compile_us": min(compile_us), **run.measured(row, judge)}


def main(arguments: list[str]) -> None:
    """Backend, tokenizer file, id of the end, `gate` or `raw`; then rows of schemas come in by standard input."""
    name, file, end, gate = arguments
    tokenizer = Tokenizer.from_file(str(Path(file)))
    vocabulary, eos = tokenizer.get_vocab_size(), int(end)
    backend = BACKENDS[name, gate](tokenizer, vocabulary, eos)
    walks = Walks(tokenizer, vocabulary, eos) if (name, gate) == ("llguidance", "gate") else None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SCHEMA_S_MAX)
        sys.stdout.write(json.dumps(measured(json.loads(line), backend, tokenizer, walks, gate == "gate")) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
