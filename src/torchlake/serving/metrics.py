"""What a server counts: the metrics of Text Embeddings Inference under their names, and torchlake's own.

With several processes each writes its numbers into files of PROMETHEUS_MULTIPROC_DIR, and any of them answers for all;
counts of a process that has ended stay, its gauges go.
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

if TYPE_CHECKING:
    from torchlake.serving.exchange import ServedRequest

FAILURES = {
    "Validation": "validation",
    "Tokenizer": "tokenization",
    "Empty": "validation",
    "Overloaded": "overloaded",
    "Backend": "inference",
    "Unhealthy": "unhealthy",
}
"TEI's names of failures in its metrics, by those in its answers; it knows no `unhealthy`."
DROPPED = "dropped"
"That of a request whose client has gone."
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)


class ServerMetrics:
    """The metrics of one process."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("te_request_count", "Requests.", ["method"], registry=registry)
        self.success = Counter("te_request_success", "Answered requests.", ["method"], registry=registry)
        self.failure = Counter("te_request_failure", "Refused requests.", ["err"], registry=registry)
        self.seconds = {
            name: Histogram(f"te_request_{name}duration", "Seconds.", buckets=SECONDS, registry=registry)
            for name in ("", "tokenization_", "queue_", "inference_")
        }
        self.queue = Gauge("te_queue_size", "Requests that wait.", registry=registry, multiprocess_mode="livesum")
        self.batch_rows = Histogram("te_batch_next_size", "Rows of a batch.", buckets=SIZES, registry=registry)
        self.batch_tokens = Histogram("te_batch_next_tokens", "Tokens of a batch.", buckets=SIZES, registry=registry)
        self.row_errors = Counter("torchlake_row_errors", "Rows with an error.", ["reason"], registry=registry)
        self.truncated = Counter("torchlake_truncated_rows", "Rows that were truncated.", registry=registry)
        self.reload_failures = Counter("torchlake_reload_failures", "Models not taken.", registry=registry)
        self.model = Gauge(
            "torchlake_model_info", "The loaded model.", ["sha"], registry=registry, multiprocess_mode="livemax"
        )
        alive = Gauge("torchlake_processes", "Processes that serve.", registry=registry, multiprocess_mode="livesum")
        alive.set(1)

    def serving(self, started: int) -> int:
        """Return how many of the processes that were started on this port serve."""
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        return len(list(Path(folder).glob("gauge_livesum_*.db"))) if folder else started

    def count(self, used: "ServedRequest", seconds: float) -> None:
        """Count one request, as `single` or `batch` by its rows, and its times if it is answered."""
        method = "batch" if used.rows > 1 else "single"
        self.requests.labels(method).inc()
        answered = 0 < used.status < 400
        if answered:
            self.success.labels(method).inc()
            self.seconds[""].observe(seconds)
        else:
            self.failure.labels(DROPPED if used.status == 499 else FAILURES[used.kind]).inc()
        if answered and used.rows:
            self.seconds["tokenization_"].observe(used.reading_s)
            self.seconds["queue_"].observe(used.queued_s)
            self.seconds["inference_"].observe(used.computed_s)
            rows, tokens = used.model.batcher.last_batch
            self.batch_rows.observe(rows)
            self.batch_tokens.observe(tokens)
        for reason, rows in used.errors.items():
            self.row_errors.labels(reason if reason.isidentifier() else "other").inc(rows)
        if used.truncated:
            self.truncated.inc(used.truncated)

    def named(self, sha: str, before: str | None = None) -> None:
        """Note which model is loaded."""
        if before is not None:
            self.model.labels(before).set(0)
        self.model.labels(sha).set(1)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        registry = self.registry
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        # The client adds _total to the names of counters, and times of creation; TEI, and its dashboards, have neither.
        text = re.sub(rb"(?m)^(# \w+ )?\w+_created\b.*\n", b"", generate_latest(registry))
        return re.sub(rb"_total(?=[ {])", b"", text)
