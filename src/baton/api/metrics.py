"""Prometheus metrics, under the names that an operator of vLLM would look for (with `baton_` in front, or vLLM's own:
`metric_names`).

Owns its registry, so that several apps live in one process. The engine's gauges are read when somebody scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from baton.api.constraint_compiler import CompileOutcome
from baton.api.engine import Engine, EngineInfo, Gauges
from baton.api.histograms import (
    CHOICES,
    FIRST_TOKEN_S,
    PER_TOKEN_S,
    STAGE_S,
    TOKENS,
    WHOLE_S,
    UnlockedHistogram,
    cumulative,
)
from baton.api.metric_names import MetricNames
from baton.api.named_metrics import NamedMetrics
from baton.api.text_reader import TextDelta
from baton.core.engine.ended import Bill
from baton.core.engine.gauges import (
    STEP_TOKENS,
    HandoverGauges,
    KvEventTraffic,
    SchedulerGauges,
    StepSizes,
    StorageGauges,
    StoreTraffic,
)
from baton.core.engine.request import FinishReason, Submission

_COMPILE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 5, 15, 60)
_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})


class _EngineCollector(Collector):
    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterable[Metric]:
        gauges = self._engine.gauges
        now = gauges.scheduler
        role = InfoMetricFamily("baton_role", "What this instance does", labels=["model_name"])
        role.add_metric([self._model], {"role": gauges.role})
        yield role
        yield self._cache_config(self._engine.info, now)
        yield from self._of_blocks(now)
        yield from self._of_handovers(now.handovers)
        yield from self._of_host_memory(now.storage, gauges.store)
        yield from self._of_store(now.storage, gauges.store)
        yield from self._of_kv_events(gauges.kv_events)
        refused = CounterMetricFamily(
            "baton_peer_refusals", "Connections and frames of peers that were refused", labels=["reason", "model_name"]
        )
        for reason, count in gauges.peers.refused.items():
            refused.add_metric([reason, self._model], count)
        yield refused
        yield self._count("kv_arrived_bytes", "KV that peers have sent", gauges.peers.arrived_bytes)
        yield self._gauge("num_requests_running", "Requests in the batch", now.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue", now.waiting)
        yield self._gauge("reserve_ratio", "Share of the remaining outputs that is reserved", now.reserve_ratio)
        yield self._count("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", now.prefix_queries)
        yield self._count("prefix_cache_hits", "Prompt tokens that the prefix cache had", now.prefix_hits)
        yield self._count("stale_results", "Results of an old epoch that were dropped", now.stale_results)
        yield self._count(
            "constrained_rows_sat_out",
            "Decodes with a constraint that waited a step for their mask",
            now.sat_out_rows,
        )
        yield self._preemptions(gauges)
        yield self._count("recomputed_tokens", "Tokens computed again after a preemption", now.recomputed_tokens)
        yield self._count(
            "chunk_prefill_unsatisfied",
            "Passes in which the next chunk of a started prefill did not fit",
            now.chunk_prefill_unsatisfied,
        )
        yield self._count("engine_steps", "Steps the executor ran", now.steps)
        yield self._iteration_tokens(gauges.step_sizes)
        yield self._count("engine_stalls", "Times an engine stood still and was given up", gauges.stalls)
        yield self._count("draft_tokens", "Guessed tokens computed along with decodes", gauges.drafts.fed)
        yield self._count("accepted_draft_tokens", "Guessed tokens that proved right", gauges.drafts.accepted)

    def _cache_config(self, info: EngineInfo, now: SchedulerGauges) -> Metric:
        family = InfoMetricFamily("baton_cache_config", "The KV pool, as labels", labels=["model_name"])
        sizes = {
            "block_size": info.block_size,
            "num_gpu_blocks": info.blocks,
            "num_cpu_blocks": now.storage.host_rows,
            "kv_cache_size_tokens": info.blocks * info.block_size,
            "enable_prefix_caching": info.prefix_cache,
        }
        family.add_metric([self._model], {name: str(value) for name, value in sizes.items()})
        return family

    def _iteration_tokens(self, sizes: StepSizes) -> Metric:
        text = "Tokens that a step computed, of prompts and of answers; not at a router"
        family = HistogramMetricFamily("baton_iteration_tokens_total", text, labels=["model_name"])
        family.add_metric([self._model], cumulative(STEP_TOKENS, sizes.counts), sizes.tokens)
        return family

    def _of_blocks(self, gauges: SchedulerGauges) -> Iterable[Metric]:
        by_state = gauges.blocks._asdict()
        family = GaugeMetricFamily("baton_kv_blocks", "KV blocks by state", labels=["model_name", "state"])
        for state, count in by_state.items():
            family.add_metric([self._model, state], count)
        yield family
        total, reusable = sum(by_state.values()), by_state["free"] + by_state["evictable"]
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", 1 - reusable / total if total else 0)

    def _of_handovers(self, handovers: HandoverGauges) -> Iterable[Metric]:
        yield self._gauge(
            "peers", "Sessions with instances that prefill for this one, or that this one prefills for", handovers.peers
        )
        yield self._gauge("handovers_open", "Hand-overs under way", handovers.open)
        family = CounterMetricFamily("baton_handovers", "Hand-overs that ended", labels=["outcome", "model_name"])
        outcomes = {
            "made": handovers.made,
            "refused": handovers.refused,
            "not_delivered": handovers.not_delivered,
            "preempted": handovers.preempted,
            "timed_out": handovers.timed_out,
        }
        for outcome, count in outcomes.items():
            family.add_metric([outcome, self._model], count)
        yield family

    def _of_host_memory(self, storage: StorageGauges, moved: StoreTraffic) -> Iterable[Metric]:
        yield self._gauge("host_kv_blocks", "KV blocks that host memory has room for", storage.host_rows)
        yield self._gauge("host_kv_blocks_used", "KV blocks that host memory holds", storage.host_used)
        yield self._count("kv_saved_blocks", "KV blocks copied from the pool to host memory", storage.saved)
        yield self._count("kv_unsaved_blocks", "KV blocks that host memory had no room or time for", storage.unsaved)
        yield self._count("kv_loaded_blocks", "KV blocks copied back from host memory", storage.loaded)
        yield self._count("kv_saved_bytes", "KV copied from the pool to host memory", moved.saved_bytes)
        yield self._count("kv_loaded_bytes", "KV copied back from host memory", moved.loaded_bytes)
        yield self._count(
            "kv_recompute_cheaper_blocks",
            "KV blocks that were not kept or fetched because computing them is quicker",
            storage.recompute_cheaper,
        )
        yield self._gauge("kv_transfers_open", "Transfers with host memory or the store under way", storage.transfers)
        yield self._count("kv_transfers_failed", "Transfers with host memory or the store that failed", storage.failed)
        yield self._count("kv_transfers_late", "Transfers with host memory or the store given up as too slow", storage.late)

    def _of_store(self, storage: StorageGauges, moved: StoreTraffic) -> Iterable[Metric]:
        yield self._count("store_stored_blocks", "KV blocks written to the store", storage.stored)
        yield self._count("store_unstored_blocks", "KV blocks that the store had no room for or failed", storage.unstored)
        yield self._count("store_fetched_blocks", "KV blocks read from the store", storage.fetched)
        yield self._count("store_missing_blocks", "KV blocks that the store did not have any more", moved.missing_blocks)
        yield self._count("store_stored_bytes", "KV written to the store", moved.stored_bytes)
        yield self._count("store_fetched_bytes", "KV read from the store", moved.fetched_bytes)
        yield self._count("store_errors", "Transfers that the store failed", moved.errors)
        yield self._gauge("store_breaker_open", "1 while the store is left alone because it failed", storage.breaker_open)
        yield self._count("store_breaker_opened", "How often the store was left alone", storage.breaker_opened)
        bad = CounterMetricFamily(
            "baton_store_bad_blocks", "Stored KV that was found bad, dropped and never used", labels=["reason", "model_name"]
        )
        for reason, count in moved.bad_blocks.items():
            bad.add_metric([reason, self._model], count)
        yield bad

    def _of_kv_events(self, events: KvEventTraffic) -> Iterable[Metric]:
        yield self._count("kv_event_batches", "Batches of KV events that were published", events.batches)
        yield self._count("kv_event_stored_blocks", "KV blocks that readers of KV events were told of", events.stored_blocks)
        yield self._count(
            "kv_event_removed_blocks", "KV blocks that readers of KV events were told to forget", events.removed_blocks
        )
        yield self._count("kv_event_clears", "How often readers of KV events were told to forget everything", events.cleared)
        yield self._count("kv_event_replays", "Requests of readers for KV events that they missed", events.replays)

    def _preemptions(self, gauges: Gauges) -> Metric:
        labels = ["cause", "policy", "model_name"]
        family = CounterMetricFamily("baton_num_preemptions", "Requests sent back to the queue", labels=labels)
        # All labels from the start: a rate over a missing series misses its first event.
        for cause, count in gauges.preemptions.items():
            family.add_metric([cause, gauges.victim_policy, self._model], count)
        return family

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"baton_{name}", help_text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _count(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"baton_{name}", help_text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


class _LogCollector(Collector):
    def __init__(self, lines_dropped: Callable[[], int]) -> None:
        self._lines_dropped = lines_dropped

    def collect(self) -> Iterable[Metric]:
        text = "Log lines of this process that were dropped because nobody read its standard error"
        yield CounterMetricFamily("baton_log_lines_dropped", text, value=self._lines_dropped())


class _GivenTokens(Collector):
    """Counted as a plain number, since it rises with every delivery."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily("baton_generation_tokens", "Tokens given to clients", labels=["model_name"])
        family.add_metric([self._model], self._metrics.tokens_given)
        yield family


class Metrics:
    def __init__(
        self,
        engine: Engine,
        model: str,
        log_lines_dropped: Callable[[], int] = lambda: 0,
        names: MetricNames = MetricNames.BATON,
    ) -> None:
        self._registry = CollectorRegistry()
        self._named = NamedMetrics(self._registry, names)
        self._model = model
        self._registry.register(_EngineCollector(engine, model))
        self._registry.register(_LogCollector(log_lines_dropped))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests", model)
        self.tokens_given = 0
        """Tokens given to clients."""
        self._registry.register(_GivenTokens(self, model))
        self._declare_histograms()
        ended = self._labelled("request_success", "Ended requests", ["model_name", "finished_reason"])
        self._ended = {reason: ended.labels(model, reason.value) for reason in FinishReason}
        self._declare_constraints(model)
        self._http = self._labelled("http_requests", "HTTP requests", ["method", "path", "status"])
        self._http_refusals = self._labelled(
            "http_refusals", "Clients refused or shed before a request was understood", ["reason"]
        )
        self._refused_fields = self._labelled("refused_fields", "Bodies with a field that only routers may set", ["field"])

    def _declare_histograms(self) -> None:
        made = self._histogram
        self.first_token_s = made("time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN_S)
        self.between_s = made(
            "inter_token_latency_seconds", "Between deliveries of a choice after its first token", PER_TOKEN_S
        )
        self.per_token_s = made(
            "time_per_output_token_seconds", "The same, divided by the tokens of the delivery", PER_TOKEN_S
        )
        self.mean_per_token_s = made(
            "request_time_per_output_token_seconds", "Mean time per token of a choice after its first", PER_TOKEN_S
        )
        self.whole_s = made("e2e_request_latency_seconds", "Arrival to end", WHOLE_S)
        self.queue_s = made("request_queue_time_seconds", "Time in the queue, that after preemptions included", STAGE_S)
        self.prefill_s = made("request_prefill_time_seconds", "Time in prefill, that after preemptions included", STAGE_S)
        self.decode_s = made("request_decode_time_seconds", "Time in decode", STAGE_S)
        self.inference_s = made("request_inference_time_seconds", "Prefill, hand-over and decode together", STAGE_S)
        self.request_prompt_tokens = made("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.request_output_tokens = made("request_generation_tokens", "Tokens of an answer", TOKENS)
        self.longest_output_tokens = made(
            "request_max_num_generation_tokens", "Tokens of the longest of a request's choices", TOKENS
        )
        self.params_n = made("request_params_n", "The field n of a request", CHOICES)
        self.params_max_tokens = made("request_params_max_tokens", "Most tokens that a choice may have, if limited", TOKENS)

    def _declare_constraints(self, model: str) -> None:
        asked = self._labelled(
            "constraints", "Constraints that requests asked for, by how compiling ended", ["model_name", "outcome"]
        )
        self._constraints = {outcome: asked.labels(model, outcome.value) for outcome in CompileOutcome}
        self._compile_s = self._histogram(
            "constraint_compile_seconds", "Waiting for and compiling a constraint that is not cached", _COMPILE_S
        )
        self._constraint_bytes = Gauge(
            "baton_constraint_cache_bytes", "Memory of compiled constraints", ["model_name"], registry=self._registry
        ).labels(model)

    def add(self, collector: Collector) -> None:
        """Add a collector to the same page."""
        self._registry.register(collector)

    def _labelled(self, name: str, help_text: str, labels: list[str]) -> Counter:
        return Counter(f"baton_{name}", help_text, labels, registry=self._registry)

    def _counter(self, name: str, help_text: str, model: str) -> Counter:
        return self._labelled(name, help_text, ["model_name"]).labels(model)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> UnlockedHistogram:
        made = UnlockedHistogram(f"baton_{name}", help_text, buckets, {"model_name": self._model})
        self._registry.register(made)
        return made

    def count_http(self, method: str, path: str, status: int) -> None:
        """`path` is a route's template, never what the client typed: labels stay few."""
        self._http.labels(method if method in _METHODS else "other", path, str(status)).inc()

    def count_http_refusal(self, reason: str) -> None:
        """`reason` is named by the server, so labels stay few."""
        self._http_refusals.labels(reason).inc()

    def count_refused_field(self, name: str) -> None:
        """`name` is one of the few that are internal, so labels stay few."""
        self._refused_fields.labels(name).inc()

    def count_constraint(self, outcome: CompileOutcome) -> None:
        self._constraints[outcome].inc()

    def observe_constraint(self, seconds: float) -> None:
        self._compile_s.observe(seconds)

    def note_constraints_held(self, size_bytes: int) -> None:
        self._constraint_bytes.set(size_bytes)

    def count_end(self, reason: FinishReason) -> None:
        self._ended[reason].inc()

    def observe_asked(self, group: Sequence[Submission], n: int) -> None:
        """An accepted request: its choices as submitted, and how many there are of each prompt."""
        self.params_n.observe(n)
        for one in group:
            if one.max_tokens is not None:
                self.params_max_tokens.observe(one.max_tokens)

    def observe_bill(self, bill: Bill) -> None:
        """The time that a choice spent in each stage, over all of its attempts. One that no engine had spent none."""
        if not (bill.queue_us or bill.prefill_us or bill.decode_us):
            return
        self.queue_s.observe(bill.queue_us / 1e6)
        self.prefill_s.observe(bill.prefill_us / 1e6)
        self.decode_s.observe(bill.decode_us / 1e6)
        self.inference_s.observe((bill.prefill_us + bill.transfer_us + bill.decode_us) / 1e6)

    def page(self) -> bytes:
        return generate_latest(self._named)


class AnswerTimes:
    """Observes the latency histograms for the choices of one request."""

    def __init__(self, metrics: Metrics, arrived_s: float, prompt_lengths: Iterable[int], choices: int) -> None:
        self._metrics = metrics
        self._start = arrived_s
        self._open = choices
        self._first: list[float | None] = [None] * choices
        """By choice: when its first token that is timed was given."""
        self._last: list[float | None] = [None] * choices
        self._tokens = [0] * choices
        self._timed = [0] * choices
        """By choice: tokens after those given at `_first`."""
        for length in prompt_lengths:
            metrics.prompt_tokens.inc(length)
            metrics.request_prompt_tokens.observe(length)

    def seen(self, delta: TextDelta) -> None:
        now = time.perf_counter()
        if delta.tokens:
            self._seen_tokens(delta.index, len(delta.tokens), now)
        if delta.finish is not None:
            self._open -= 1
            self._metrics.count_end(delta.finish)
            self._metrics.whole_s.observe(now - self._start)
            self._metrics.request_output_tokens.observe(self._tokens[delta.index])
            self._observe_mean(delta.index)
            if not self._open:
                self._metrics.longest_output_tokens.observe(max(self._tokens))

    def passed(self, delta: TextDelta) -> None:
        """A delta that the client already has: neither timed nor counted."""
        self._first[delta.index] = self._last[delta.index] = time.perf_counter()
        self._open -= delta.finish is not None

    def close(self, reason: FinishReason) -> None:
        """No more deltas. Choices still open end with this reason."""
        for _ in range(self._open):
            self._metrics.count_end(reason)
        self._open = 0

    def _seen_tokens(self, index: int, count: int, now: float) -> None:
        last, metrics = self._last[index], self._metrics
        if last is None:
            metrics.first_token_s.observe(now - self._start)
            self._first[index] = now
        else:
            metrics.between_s.observe(now - last)
            metrics.per_token_s.observe((now - last) / count)
            self._timed[index] += count
        self._last[index] = now
        self._tokens[index] += count
        metrics.tokens_given += count

    def _observe_mean(self, index: int) -> None:
        first, last, tokens = self._first[index], self._last[index], self._timed[index]
        if tokens and first is not None and last is not None:
            self._metrics.mean_per_token_s.observe((last - first) / tokens)
