"""The families of a registry under the names asked for, as `metric_names` maps them.

vLLM's have the label `engine` as well. Leaves out the `_created` series that prometheus_client makes beside each counter:
here, since its own switch for them is global.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from baton.api.metric_names import COUNTERPARTS, DROPPED, ENGINE, REASONS, MetricNames


class NamedMetrics(Collector):
    def __init__(self, families: Collector, names: MetricNames) -> None:
        self._families = families
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for family in self._families.collect():
            theirs = () if self._names is MetricNames.BATON else COUNTERPARTS.get(family.name, ())
            if not theirs or self._names is MetricNames.BOTH or family.name in DROPPED:
                yield _without_created(family)
            for name in theirs:
                yield renamed(family, name)


def _without_created(family: Metric) -> Metric:
    created = f"{family.name}_created"
    if all(sample.name != created for sample in family.samples):
        return family
    made = Metric(family.name, family.documentation, family.type)
    made.samples = [sample for sample in family.samples if sample.name != created]
    return made


def renamed(family: Metric, name: str) -> Metric:
    """The family under vLLM's name, with its labels and values; samples that are then alike are summed."""
    dropped = DROPPED.get(family.name, frozenset())
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in _without_created(family).samples:
        key = name + sample.name.removeprefix(family.name), tuple(_labels(sample.labels, dropped))
        sums[key] = sums.get(key, 0.0) + sample.value
    made = Metric(name, family.documentation, family.type)
    made.samples = [Sample(sample_name, dict(labels), value) for (sample_name, labels), value in sums.items()]
    return made


def _labels(labels: Mapping[str, str], dropped: Collection[str]) -> Iterator[tuple[str, str]]:
    yield "engine", ENGINE
    for name, value in labels.items():
        if name not in dropped:
            yield name, REASONS.get(value, value) if name == "finished_reason" else value
