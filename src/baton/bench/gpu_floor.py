"""The lower bound of a step's time: bytes to read and products to compute, at the machine's measured rates.

    floor = Σ over operations of max(bytes ÷ read rate, FLOP ÷ matrix rate)

Owns what a step of a shape consists of. An operation reads its weights, or the KV that it attends to, once; activations,
norms and the lookup of embeddings are taken as nothing. Layers that look back only so far read no more than that. Of
experts, those are read that a batch is expected to choose when every one is as likely. Pure arithmetic: no torch, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.executor.model_shapes import Fields

ITEM_BYTES = 2
"""Bytes per item of weights and KV: bfloat16."""
GEMMA2_WINDOWED_EVERY = 2
"""Every n-th layer of Gemma 2 has windowed attention."""


@dataclass(frozen=True, slots=True)
class GpuRates:
    """Read and matrix rates measured in this run."""

    read_bytes_per_s: float
    matrix_flop_per_s: float


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    bytes: float
    flop: float

    def least_s(self, rates: GpuRates) -> float:
        return max(self.bytes / rates.read_bytes_per_s, self.flop / rates.matrix_flop_per_s)


@dataclass(frozen=True, slots=True)
class Experts:
    count: int
    chosen: int
    parameters: int
    """Of one."""

    def touched(self, tokens: int) -> float:
        """Expected number of distinct experts chosen by `tokens` tokens."""
        return self.count * (1.0 - (1.0 - self.chosen / self.count) ** tokens)


@dataclass(frozen=True, slots=True)
class ModelSizesOnGpu:
    """Sizes of a model shape that the floor needs."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    products: tuple[tuple[str, int], ...]
    """Name and parameters of each matrix of a layer, experts aside."""
    head_parameters: int
    """Parameters of the logits product."""
    experts: Experts | None
    windows: tuple[int | None, ...]
    """Attention window of each layer."""

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * ITEM_BYTES

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that products read; a tied embedding table counts, since it computes the logits."""
        experts = 0 if self.experts is None else self.experts.count * self.experts.parameters
        in_layer = sum(parameters for _, parameters in self.products) + experts
        return ITEM_BYTES * (self.layers * in_layer + self.head_parameters)

    @property
    def token_flop(self) -> float:
        """FLOP of one token's products in all layers, without logits."""
        chosen = 0 if self.experts is None else self.experts.chosen * self.experts.parameters
        return 2.0 * self.layers * (sum(parameters for _, parameters in self.products) + chosen)

    @property
    def pair_flop(self) -> float:
        """FLOP of attention of one token to one position in all layers."""
        return 4.0 * self.layers * self.heads * self.head_dim


def sizes_of(fields: Fields) -> ModelSizesOnGpu:
    layers, heads = _whole(fields, "num_hidden_layers"), _whole(fields, "num_attention_heads")
    kv_heads, head_dim = _whole(fields, "num_key_value_heads"), _whole(fields, "head_dim")
    hidden = _whole(fields, "hidden_size")
    products = [("qkv", hidden * (heads + 2 * kv_heads) * head_dim), ("o", heads * head_dim * hidden)]
    experts = None
    if "num_experts" in fields:
        experts = Experts(
            count=_whole(fields, "num_experts"),
            chosen=_whole(fields, "num_experts_per_tok"),
            parameters=3 * hidden * _whole(fields, "moe_intermediate_size"),
        )
        products.append(("router", hidden * experts.count))
    else:
        inner = _whole(fields, "intermediate_size")
        products += [("gate and up", 2 * hidden * inner), ("down", inner * hidden)]
    head = _whole(fields, "vocab_size") * hidden
    return ModelSizesOnGpu(layers, heads, kv_heads, head_dim, tuple(products), head, experts, _windows(fields, layers))


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if fields.get("sliding_window") is None:
        return (None,) * layers
    window = _whole(fields, "sliding_window")
    if fields["model_type"] == "gemma2":
        return tuple(window if layer % GEMMA2_WINDOWED_EVERY == 0 else None for layer in range(layers))
    return (window,) * layers


def _whole(fields: Fields, name: str) -> int:
    value = fields[name]
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, not a whole number")
    return value


def decode_operations(sizes: ModelSizesOnGpu, batch: int, context: int) -> list[Operation]:
    """A step in which each of `batch` sequences feeds one token and attends to `context` positions."""
    kv_bytes = 2 * sizes.kv_heads * sizes.head_dim * ITEM_BYTES
    pair_flop = 4.0 * sizes.heads * sizes.head_dim
    operations = []
    for window in sizes.windows:
        seen = batch * (context if window is None else min(context, window))
        operations += _products(sizes, batch)
        operations.append(Operation("attention", float(seen * kv_bytes), seen * pair_flop))
    return [*operations, _head(sizes, batch)]


def prefill_operations(sizes: ModelSizesOnGpu, sequences: int, tokens: int, begin: int = 0) -> list[Operation]:
    """A step that feeds the next `tokens` of each sequence after `begin` of them, and yields one token each."""
    kv_bytes = 2 * sizes.kv_heads * sizes.head_dim * ITEM_BYTES
    operations = []
    for window in sizes.windows:
        pairs = sequences * pairs_of(tokens, begin, window)
        operations += _products(sizes, sequences * tokens)
        read = float(sequences * (begin + tokens) * kv_bytes)
        operations.append(Operation("attention", read, 4.0 * sizes.heads * sizes.head_dim * pairs))
    return [*operations, _head(sizes, sequences)]


def pairs_of(tokens: int, begin: int, window: int | None = None) -> int:
    """How many positions the tokens [begin, begin + tokens) of a sequence attend to in all, themselves included."""
    if window is None:
        return tokens * begin + tokens * (tokens + 1) // 2
    growing = max(0, min(begin + tokens, window) - begin)
    """Tokens that attend to all earlier positions."""
    return growing * begin + growing * (growing + 1) // 2 + (tokens - growing) * window


def floor_s(operations: list[Operation], rates: GpuRates) -> float:
    return sum(operation.least_s(rates) for operation in operations)


def flop_of(operations: list[Operation]) -> float:
    return sum(operation.flop for operation in operations)


def _products(sizes: ModelSizesOnGpu, tokens: int) -> list[Operation]:
    found = [
        Operation(name, float(ITEM_BYTES * parameters), 2.0 * parameters * tokens) for name, parameters in sizes.products
    ]
    if sizes.experts is not None:
        one = sizes.experts
        read = ITEM_BYTES * one.touched(tokens) * one.parameters
        found.append(Operation("experts", read, 2.0 * one.chosen * one.parameters * tokens))
    return found


def _head(sizes: ModelSizesOnGpu, rows: int) -> Operation:
    return Operation("logits", float(ITEM_BYTES * sizes.head_parameters), 2.0 * sizes.head_parameters * rows)
