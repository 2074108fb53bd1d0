"""Records made by hand: small ones with known answers, and large ones that look like a real hour."""

from __future__ import annotations

import numpy as np

from baton.sim.run_records import InstanceSample, RequestOutcome, RunRecord, SimulatedRequest, StepSpan


def request_record(
    index: int, arrived_us: int, ttft_us: int, tpot_us: int, outputs: int = 11, inputs: int = 100
) -> SimulatedRequest:
    """A finished request: its first token after `ttft_us`, then one every `tpot_us`."""
    first_us = arrived_us + ttft_us
    return SimulatedRequest(
        index, arrived_us, inputs, instance=0, first_us=first_us, ended_us=first_us + tpot_us * (outputs - 1),
        output_tokens=outputs, queue_us=ttft_us // 2, prefill_us=ttft_us // 4, decode_us=tpot_us * (outputs - 1),
        outcome=RequestOutcome.STOP,
    )  # fmt: skip


def record(*requests: SimulatedRequest, instances: int = 1, label: str = "only", seed: int = 0) -> RunRecord:
    ends_us = [request_record.ended_us for request_record in requests if request_record.ended_us is not None]
    return RunRecord(label, seed, instances, 100, 16, end_us=max(ends_us, default=0), requests=list(requests))


def sample(
    at_us: int, instance: int = 0, held: int = 40, cached: int = 20, running: int = 4, waiting: int = 0
) -> InstanceSample:
    """At an instance of 100 blocks."""
    return InstanceSample(at_us, instance, running, waiting, 100 - held - cached, cached, held, 0, 0.5)


def busy_hour(
    label: str = "new-token-ratio/newest", seed: int = 0, slow: float = 1.0, instances: int = 16, count: int = 12_000
) -> RunRecord:
    """Thousands of requests with a rush in the middle; slower in all when `slow` is above 1."""
    draw = np.random.default_rng([seed, 7])
    pool, end_us = 46_000, 600_000_000
    arrived = np.sort(draw.uniform(0, end_us * 0.97, count)).astype(np.int64)
    rush = np.exp(-(((arrived - end_us * 0.55) / (end_us * 0.15)) ** 2))
    ttft = (draw.lognormal(-0.8, 0.7, count) * (1 + 30 * rush * slow) * 1e6).astype(np.int64) + 50_000
    tpot = (draw.normal(28, 4, count).clip(12) * (1 + rush * slow) * 1e3).astype(np.int64)
    outputs = draw.lognormal(5.5, 0.7, count).astype(np.int64).clip(1, 2000)
    inputs = draw.lognormal(8.8, 1.1, count).astype(np.int64).clip(10, 120_000)
    made = RunRecord(label, seed, instances, pool, 16, steps=900_000, wall_s=41.0, spans_left_out=700_000)
    for n in range(count):
        one = request_record(n, int(arrived[n]), int(ttft[n]), int(tpot[n]), int(outputs[n]), int(inputs[n]))
        one.instance = n % instances
        one.cached_tokens = one.input_tokens // 3
        one.preemptions = int(draw.random() < rush[n] * 0.2)
        one.recomputed_tokens = one.preemptions * one.input_tokens
        made.requests.append(one)
    made.requests.extend(SimulatedRequest(count + n, n * 1_000_000, 500, outcome=RequestOutcome.REFUSED) for n in range(25))
    made.end_us = max(one.ended_us or 0 for one in made.requests)
    for second in range(made.end_us // 1_000_000):
        level = np.exp(-(((second * 1e6 - end_us * 0.55) / (end_us * 0.2)) ** 2))
        for instance in range(instances):
            held = int(pool * min(0.99, 0.15 + 0.75 * level + draw.normal(0, 0.04)).__abs__())
            cached = int((pool - held) * min(0.95, second / 200))
            running = int(20 + 200 * level + draw.normal(0, 6))
            waiting = int(max(0.0, 120 * slow * (level - 0.5) + draw.normal(0, 8)))
            made.samples.append(
                InstanceSample(second * 1_000_000, instance, running, waiting, pool - held - cached, cached, held, 0, 0.3)
            )
    at_us = [0] * instances
    for n in range(count * 2):
        instance = n % instances
        took_us = 8_000 + int(draw.integers(0, 30_000))
        prefill = 2048 if n % 7 == 0 else 0
        made.spans.append(StepSpan(instance, n // instances, at_us[instance], at_us[instance] + took_us, 30, prefill))
        at_us[instance] += took_us + 200
    made.busy_us = [int(made.end_us * share) for share in draw.uniform(0.6, 0.95, instances)]
    return made
