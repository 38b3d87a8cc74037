"""What /metrics says, in Prometheus' text form."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Gauges:
    """Counts since the start. Every name begins with jaxrl_post_, but for those of the process."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by endpoint and status of HTTP.", ("endpoint", "status"))
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.tokens = self._counter("tokens", "Tokens of finished rollouts.")
        self.left = self._counter("left", "Requests whose client went away.")
        self.restarts = self._counter("engine_restarts", "Failures of the engine, after each of which it began anew.")
        self.unread = self._counter("run_unread", "Looks at a followed run at which its newest step could not be read.")
        self.seconds = self._histogram("request_seconds", "Seconds of a request.")
        self.first_token = self._histogram("first_token_seconds", "Seconds until a request's first token or end.")
        self._steps = self._counter("engine_steps", "Steps of the engine.")
        self._dispatches = self._counter("engine_dispatches", "Dispatches of the engine.")
        self._rows = self._counter("engine_rows", "Rows of the engine by use.", ("use",))
        prometheus.ProcessCollector(registry=self.registry)

    def watch(self, name: str, about: str, value: Callable[[], float]) -> None:
        """Adds a gauge whose value is asked for at every scrape."""
        Gauge(f"jaxrl_post_{name}", about, registry=self.registry).set_function(value)

    def counted(self, counters: Mapping[str, float]) -> None:
        """Adds the counters of a dispatch (RowHost.metrics)."""
        for name, amount in counters.items():
            use = name.removeprefix("eval/rows/")
            if use == "steps":
                self._steps.inc(amount)
            elif use == "dispatches":
                self._dispatches.inc(amount)
            elif use != name and not use.startswith("size_"):
                self._rows.labels(use).inc(amount)

    def text(self) -> bytes:
        """Returns all of it in Prometheus' text form."""
        return prometheus.generate_latest(self.registry)

    def _counter(self, name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"jaxrl_post_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(f"jaxrl_post_{name}", about, buckets=_SECONDS, registry=self.registry)
