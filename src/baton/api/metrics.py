"""Prometheus metrics, under the names that an operator of vLLM would look for (with `baton_` in front).

Owns its registry, so that several apps live in one process. The engine's gauges are read when somebody scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.api.constraint_compiler import CompileOutcome
from baton.api.engine import Engine, Gauges
from baton.api.text_reader import TextDelta
from baton.core.engine.gauges import HandoverGauges, SchedulerGauges, StorageGauges, StoreTraffic
from baton.core.engine.request import FinishReason

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_WHOLE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
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
        yield from self._of_blocks(now)
        yield from self._of_handovers(now.handovers)
        yield from self._of_host_memory(now.storage, gauges.store)
        yield from self._of_store(now.storage, gauges.store)
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
        yield self._count("draft_tokens", "Guessed tokens computed along with decodes", gauges.drafts.fed)
        yield self._count("accepted_draft_tokens", "Guessed tokens that proved right", gauges.drafts.accepted)

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


class Metrics:
    def __init__(self, engine: Engine, model: str, log_lines_dropped: Callable[[], int] = lambda: 0) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model))
        self._registry.register(_LogCollector(log_lines_dropped))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests", model)
        self._generation_tokens = self._counter("generation_tokens", "Tokens given to clients", model)
        self.tokens_given = 0
        """The same count, readable without a scrape."""
        self.first_token_s = self._histogram("time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN_S, model)
        self.per_token_s = self._histogram(
            "time_per_output_token_seconds", "Between tokens after the first", _PER_TOKEN_S, model
        )
        self.whole_s = self._histogram("e2e_request_latency_seconds", "Arrival to end", _WHOLE_S, model)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS, model)
        self.request_output_tokens = self._histogram("request_generation_tokens", "Tokens of an answer", _TOKENS, model)
        ended = self._labelled("request_success", "Ended requests", ["model_name", "finished_reason"])
        self._ended = {reason: ended.labels(model, reason.value) for reason in FinishReason}
        self._declare_constraints(model)
        self._http = self._labelled("http_requests", "HTTP requests", ["method", "path", "status"])
        self._http_refusals = self._labelled(
            "http_refusals", "Clients refused or shed before a request was understood", ["reason"]
        )
        self._refused_fields = self._labelled("refused_fields", "Bodies with a field that only routers may set", ["field"])

    def _declare_constraints(self, model: str) -> None:
        asked = self._labelled(
            "constraints", "Constraints that requests asked for, by how compiling ended", ["model_name", "outcome"]
        )
        self._constraints = {outcome: asked.labels(model, outcome.value) for outcome in CompileOutcome}
        self._compile_s = self._histogram(
            "constraint_compile_seconds", "Waiting for and compiling a constraint that is not cached", _COMPILE_S, model
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

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...], model: str) -> Histogram:
        return Histogram(f"baton_{name}", help_text, ["model_name"], buckets=buckets, registry=self._registry).labels(model)

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

    def count_tokens(self, count: int) -> None:
        self._generation_tokens.inc(count)
        self.tokens_given += count

    def count_end(self, reason: FinishReason) -> None:
        self._ended[reason].inc()

    def page(self) -> bytes:
        return generate_latest(self._registry)


class AnswerTimes:
    """Observes the latency histograms for the choices of one request."""

    def __init__(self, metrics: Metrics, arrived_s: float, prompt_lengths: Iterable[int], choices: int) -> None:
        self._metrics = metrics
        self._start = arrived_s
        self._open = choices
        self._last: list[float | None] = [None] * choices
        self._tokens = [0] * choices
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

    def passed(self, delta: TextDelta) -> None:
        """A delta that the client already has: neither timed nor counted."""
        self._last[delta.index] = time.perf_counter()
        self._open -= delta.finish is not None

    def close(self, reason: FinishReason) -> None:
        """No more deltas. Choices still open end with this reason."""
        for _ in range(self._open):
            self._metrics.count_end(reason)
        self._open = 0

    def _seen_tokens(self, index: int, count: int, now: float) -> None:
        last = self._last[index]
        if last is None:
            self._metrics.first_token_s.observe(now - self._start)
        else:
            self._metrics.per_token_s.observe((now - last) / count)
        self._last[index] = now
        self._tokens[index] += count
        self._metrics.count_tokens(count)
