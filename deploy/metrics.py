"""Prometheus metrics of a process that lives as long as its jobs, in a registry of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.metrics_server import EndpointSecurity, MetricsServer

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge


class ProcessMetrics:
    """Metrics whose names begin with ``prefix``. Without :meth:`listen` they are only counted."""

    def __init__(self, prefix: str) -> None:
        from prometheus_client import CollectorRegistry

        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._server: MetricsServer | None = None

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        from prometheus_client import Gauge

        return Gauge(f"{self._prefix}_{name}", text, labels, registry=self.registry)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        from prometheus_client import Counter

        return Counter(f"{self._prefix}_{name}", text, labels, registry=self.registry)

    @property
    def port(self) -> int | None:
        return None if self._server is None else self._server.port

    @property
    def url(self) -> str | None:
        return None if self._server is None else self._server.url

    def listen(self, host: str, port: int, security: EndpointSecurity) -> None:
        """Serve the metrics; port 0 takes a free one. Raises OSError, or ConfigError for unusable TLS files."""
        self._server = MetricsServer(self.registry, host, port, security)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
