"""Step times of a simulated device: measured points, and a roofline model between them.

Owns the model, its JSON form and the files shipped under `models/`. The roofline gives the form of a step's time:

    launch + max(weights ÷ bandwidth, FLOP ÷ rate) + rows + KV read by decodes + attention of chunks

and each measured point gives the ratio of the machine's time to it. Between points the ratio is interpolated over the
logarithms of tokens fed and of context per token; outside, the nearest one is used. Steps that only decode and steps with
prefill have a surface of ratios each. A surface is computed on a fine grid when the model is loaded, and made monotonic
along both axes: measurements are noisy, but more work never takes less time.

Every simulated device calls `step_us` once per step, so it is plain arithmetic on lists.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from baton.core.errors import BatonError

SCHEMA: Literal[1] = 1
NODES_AN_OCTAVE = 4
FED_OCTAVES = 16
"""A surface covers tokens fed up to this power of two; beyond it, roofline differences are added."""
CONTEXT_OCTAVES = 36
ROWS_KEPT_MAX = 4096
"""Bound on cached rows, one per batch size."""

_LARGEST = 1e18
Quantity = Annotated[float, msgspec.Meta(ge=0.0, le=_LARGEST)]
Positive = Annotated[float, msgspec.Meta(gt=0.0, le=_LARGEST)]
Rate = Annotated[float, msgspec.Meta(ge=1.0, le=_LARGEST)]
Microseconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class BadStepTimes(BatonError):
    """A step-time model that cannot be used; the message names the file and the field."""


class Roofline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The roofline: a lower bound of a step's time."""

    launch_us: Microseconds
    """Fixed cost of every step."""
    weight_bytes: Quantity
    """Read once per step."""
    weight_bytes_per_s: Rate
    token_flop: Positive
    """Matrix products of one token."""
    decode_flop_per_s: Rate
    prefill_flop_per_s: Rate
    row_us: Microseconds
    """Per sequence that decodes, besides its matrix products and its KV: logits, sampling."""
    kv_bytes_per_token: Positive
    kv_bytes_per_s: Rate
    pair_flop: Positive
    """Attention of one token of a chunk to one position."""
    attention_flop_per_s: Rate

    @property
    def weights_us(self) -> float:
        return self.weight_bytes / self.weight_bytes_per_s * 1e6

    @property
    def decode_token_us(self) -> float:
        return self.token_flop / self.decode_flop_per_s * 1e6

    @property
    def prefill_token_us(self) -> float:
        return self.token_flop / self.prefill_flop_per_s * 1e6

    @property
    def context_token_us(self) -> float:
        return self.kv_bytes_per_token / self.kv_bytes_per_s * 1e6

    @property
    def pair_us(self) -> float:
        return self.pair_flop / self.attention_flop_per_s * 1e6

    def decode_us(self, decodes: float, context: float) -> float:
        """A step that only decodes."""
        products_us = max(self.weights_us, self.decode_token_us * decodes)
        return self.launch_us + products_us + self.row_us * decodes + self.context_token_us * context

    def prefill_us(self, tokens: float, pairs: float) -> float:
        """A step that only prefills."""
        return self.launch_us + max(self.weights_us, self.prefill_token_us * tokens) + self.pair_us * pairs


class MeasuredStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One measured step: the arguments of `StepTimes.step_us`, and the executor's time."""

    decodes: Count = 0
    decode_context: Count = 0
    prefill_tokens: Count = 0
    prefill_pairs: Count = 0
    us: Annotated[float, msgspec.Meta(gt=0.0, le=1e12)]


class StepTimesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The JSON form."""

    schema: Literal[1] = SCHEMA
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    measured_on: str
    """Machine, model and method, for readers of results."""
    roofline: Roofline
    layers: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    """KV can be sent after each layer; 1: not known, all of it is sent at the step's end."""
    host_us: Microseconds = 0.0
    """Engine time per step outside the executor and not overlapped with it."""
    host_row_us: Microseconds = 0.0
    """The same, per sequence that decodes."""
    points: tuple[MeasuredStep, ...] = ()


class _Sample(NamedTuple):
    fed: float
    context: float
    """Total over all tokens fed, not per token."""
    ratio: float
    """Measured ÷ roofline."""


class StepTimes:
    """The time of any step; deterministic, and monotonic in every argument."""

    def __init__(self, file: StepTimesFile) -> None:
        """Raises BadStepTimes if the values are invalid."""
        _check(file)
        self.file = file
        self.name = file.name
        roofline = file.roofline
        self._host_us = file.host_us
        self._host_row_us = file.host_row_us
        # In a step with prefill, a decode counts as this many prefill tokens, and a token of its context as this many pairs.
        self._tokens_a_decode = (roofline.decode_token_us + roofline.row_us) / roofline.prefill_token_us
        self._pairs_a_context = roofline.context_token_us / roofline.pair_us
        decodes = [_decode_sample(roofline, point) for point in file.points if not point.prefill_tokens]
        prefills = [self._prefill_sample(point) for point in file.points if point.prefill_tokens]
        knees = (roofline.weights_us / roofline.decode_token_us, roofline.weights_us / roofline.prefill_token_us)
        self._decoding = _Surface(roofline.decode_us, decodes, knees[0])
        self._prefilling = _Surface(roofline.prefill_us, prefills, knees[1])

    def step_us(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """Microseconds of a step.

        `decodes` rows decode one token each and attend to `decode_context` tokens in all. Chunks feed `prefill_tokens`;
        `prefill_pairs` is the sum, over these, of the positions that each attends to, itself included.
        """
        if decodes:
            spent_us = self._decoding.at_whole(decodes, decode_context)
            if prefill_tokens:
                spent_us = max(spent_us, self._carrying(decodes, decode_context, prefill_tokens, prefill_pairs))
            return round(spent_us + self._host_us + self._host_row_us * decodes) or 1
        if prefill_tokens:
            return round(self._prefilling.at(prefill_tokens, prefill_pairs) + self._host_us) or 1
        return round(self._host_us) or 1

    def _carrying(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> float:
        fed = prefill_tokens + self._tokens_a_decode * decodes
        return self._prefilling.at(fed, prefill_pairs + self._pairs_a_context * decode_context)

    def _prefill_sample(self, point: MeasuredStep) -> _Sample:
        fed = point.prefill_tokens + self._tokens_a_decode * point.decodes
        pairs = point.prefill_pairs + self._pairs_a_context * point.decode_context
        return _Sample(fed, pairs, point.us / self.file.roofline.prefill_us(fed, pairs))


def _decode_sample(roofline: Roofline, point: MeasuredStep) -> _Sample:
    ratio = point.us / roofline.decode_us(point.decodes, point.decode_context)
    return _Sample(point.decodes, point.decode_context, ratio)


class _Surface:
    """Microseconds over (tokens fed, total context), monotonic along both."""

    def __init__(self, roofline_us: Callable[[float, float], float], samples: Sequence[_Sample], knee: float) -> None:
        """`knee`: the tokens fed at which the roofline bends; it becomes a grid node."""
        self._roofline_us = roofline_us
        self._fed = _nodes(FED_OCTAVES, [knee, *(sample.fed for sample in samples)])
        self._context = _nodes(CONTEXT_OCTAVES, [sample.context for sample in samples])
        ratios = _Ratios(samples)
        self._us = _never_falling(
            [[roofline_us(fed, all_) * ratios.at(fed, all_) for all_ in self._context] for fed in self._fed]
        )
        self._lines: dict[int, list[float]] = {}

    def at(self, fed: float, context: float) -> float:
        fed_in, context_in = min(fed, self._fed[-1]), min(context, self._context[-1])
        row, column = _cell(self._fed, fed_in), _cell(self._context, context_in)
        share = (fed_in - self._fed[row]) / (self._fed[row + 1] - self._fed[row])
        along = (context_in - self._context[column]) / (self._context[column + 1] - self._context[column])
        low, high = self._us[row], self._us[row + 1]
        left = low[column] + share * (high[column] - low[column])
        right = low[column + 1] + share * (high[column + 1] - low[column + 1])
        inside_us = left + along * (right - left)
        if fed_in == fed and context_in == context:
            return inside_us
        return inside_us + self._roofline_us(fed, context) - self._roofline_us(fed_in, context_in)

    def at_whole(self, fed: int, context: int) -> float:
        """The same, faster, for integers: one row per value of `fed` is cached."""
        line = self._lines.get(fed)
        if line is None:
            line = self._line(fed)
        nodes = self._context
        column = bisect_right(nodes, context) - 1
        if column + 1 == len(nodes):
            return self.at(fed, context)
        return line[column] + (context - nodes[column]) / (nodes[column + 1] - nodes[column]) * (
            line[column + 1] - line[column]
        )

    def _line(self, fed: int) -> list[float]:
        if len(self._lines) >= ROWS_KEPT_MAX:
            self._lines.clear()
        line = self._lines[fed] = [self.at(fed, context) for context in self._context]
        return line


class _Ratios:
    """Measured ÷ roofline at any point: interpolated along context at the two nearest measured sizes, then between them."""

    def __init__(self, samples: Sequence[_Sample]) -> None:
        sizes: dict[float, dict[float, float]] = {}
        for sample in sorted(samples):
            sizes.setdefault(math.log(sample.fed), {})[math.log(sample.context / sample.fed)] = sample.ratio
        self._sizes = list(sizes)
        self._lines = [(list(line), list(line.values())) for line in sizes.values()]

    def at(self, fed: float, context: float) -> float:
        if not self._sizes:
            return 1.0
        size = math.log(max(fed, 1.0))
        each = math.log(max(context, 1.0) / max(fed, 1.0))
        after = bisect_right(self._sizes, size)
        near = [_between(*line, each) for line in self._lines[max(0, after - 1) : after + 1]]
        return _between(self._sizes[max(0, after - 1) : after + 1], near, size)


def _between(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """Linear interpolation; outside, the nearest value."""
    after = bisect_right(places, place)
    if after == 0:
        return values[0]
    if after == len(places):
        return values[-1]
    share = (place - places[after - 1]) / (places[after] - places[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def _nodes(octaves: int, own: Iterable[float]) -> list[float]:
    """Grid nodes: zero, powers of two with steps between, and the measured places."""
    last = 2.0**octaves
    powers = [2.0 ** (step / NODES_AN_OCTAVE) for step in range(octaves * NODES_AN_OCTAVE + 1)]
    places = sorted([0.0, *powers, *(place for place in own if 0.0 < place < last)])
    # Two nodes closer than rounding errors would make a cell without width.
    return [place for before, place in pairwise([-1.0, *places]) if place - before > 1e-9 * place]


def _cell(nodes: Sequence[float], place: float) -> int:
    """The index of the last node at or before `place` that has a node after it."""
    return min(bisect_right(nodes, place), len(nodes) - 1) - 1


def _never_falling(table: list[list[float]]) -> list[list[float]]:
    """The mean of the least monotonic table above and the greatest one below."""
    above = _running(table, max)
    flipped = [row[::-1] for row in reversed(table)]
    below = [row[::-1] for row in reversed(_running(flipped, min))]
    return [[(a + b) / 2 for a, b in zip(*rows, strict=True)] for rows in zip(above, below, strict=True)]


def _running(table: list[list[float]], pick: Callable[[float, float], float]) -> list[list[float]]:
    """Each entry reduced by `pick` with all entries before it in its row and column."""
    done: list[list[float]] = []
    for number, row in enumerate(table):
        line: list[float] = []
        for column, value in enumerate(row):
            best = pick(value, line[column - 1]) if column else value
            line.append(pick(best, done[number - 1][column]) if number else best)
        done.append(line)
    return done


def _check(file: StepTimesFile) -> None:
    """Check what the types cannot express, and the types again for values not decoded from JSON."""
    try:
        msgspec.convert(msgspec.to_builtins(file), StepTimesFile)
    except msgspec.ValidationError as error:
        raise BadStepTimes(f"{file.name}: {error}") from None
    for name in Roofline.__struct_fields__:
        _finite(file, f"roofline.{name}", getattr(file.roofline, name))
    _finite(file, "host_us", file.host_us)
    _finite(file, "host_row_us", file.host_row_us)
    seen: dict[tuple[int, int, int, int], int] = {}
    for number, point in enumerate(file.points):
        what = f"{file.name}: points[{number}]"
        _finite(file, f"points[{number}].us", point.us)
        step = (point.decodes, point.decode_context, point.prefill_tokens, point.prefill_pairs)
        if not point.decodes and not point.prefill_tokens:
            raise BadStepTimes(f"{what} feeds no tokens: decodes and prefill_tokens are both 0")
        if point.decode_context < point.decodes or bool(point.decode_context) != bool(point.decodes):
            raise BadStepTimes(f"{what}.decode_context is {point.decode_context} for {point.decodes} decodes")
        if point.prefill_pairs < point.prefill_tokens or bool(point.prefill_pairs) != bool(point.prefill_tokens):
            raise BadStepTimes(f"{what}.prefill_pairs is {point.prefill_pairs} for {point.prefill_tokens} tokens")
        if step in seen:
            raise BadStepTimes(f"{what} is the same step as points[{seen[step]}]")
        seen[step] = number


def _finite(file: StepTimesFile, field: str, value: float) -> None:
    # Comparisons with NaN are all false, so bounds alone let it pass.
    if not math.isfinite(value):
        raise BadStepTimes(f"{file.name}: {field} is {value}")


def shipped_names() -> list[str]:
    folder = resources.files("baton.sim").joinpath("models")
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_step_times(name_or_path: str) -> StepTimes:
    """A shipped model by its name, or a JSON file."""
    shipped = shipped_names()
    if name_or_path in shipped:
        text = resources.files("baton.sim").joinpath("models", f"{name_or_path}.json").read_bytes()
    else:
        path = Path(name_or_path)
        if not path.is_file():
            raise BadStepTimes(
                f"no step times {name_or_path!r}: neither a JSON file nor one of those shipped ({', '.join(shipped)})"
            )
        try:
            text = path.read_bytes()
        except OSError as error:
            raise BadStepTimes(f"{name_or_path} cannot be read: {error.strerror}") from None
    try:
        # Not msgspec's reader: it stops at a NaN by its byte, this one reads on until the field has a name.
        file = msgspec.convert(json.loads(text), StepTimesFile)
    except (ValueError, RecursionError) as error:
        raise BadStepTimes(f"{name_or_path}: {error}") from None
    return StepTimes(file)
