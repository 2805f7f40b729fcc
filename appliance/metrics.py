"""Prometheus text of the server's and the engine's counters."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = {  # of counters per kind; else "code"
    "finished": "reason",
    "reuse": "path",
    "drafted": "origin",
    "accepted": "origin",
    "accepted_at": "place",
}
GROUPS = ("grammar",)  # numbers of one part of the engine
SECONDS = "_s"
GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
# What only grows; every other plain number of the engine is a gauge.
TOTALS = frozenset(
    {
        *("submitted", "prompt_tokens", "cached_tokens", "prefill_tokens", "completion_tokens"),
        *("recomputed_tokens", "passed", "evicted_snapshots", "parked_pages", "unparked_pages"),
        *("spec_rounds", "expanded_rounds", "fallback_rows"),
        *("prefill_rounds", "decode_rounds", "row_rounds", "forward_s", "wait_s", "busy_s"),
        *("grammar_mask_s", "grammar_wait_s", "grammar_compile_s"),
        *("grammar_compiled", "grammar_cached"),
    }
)


class HttpStats:
    """What the server itself counts. requests: by method, route and status; stream_errors: by
    code, of streams that failed after their headers."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.stream_errors: Counter[str] = Counter()
        self.active = 0
        self.refused_connections = 0
        self.malformed_calls = 0

    def render(self) -> Iterator[str]:
        """Lines of exposition."""
        yield "# TYPE ginfer_http_requests_total counter"
        for (method, route, status), count in sorted(self.requests.items()):
            labels = {"method": method, "route": route, "status": str(status)}
            yield f"ginfer_http_requests_total{_labels(labels)} {count}"
        yield "# TYPE ginfer_http_stream_errors_total counter"
        for code, count in sorted(self.stream_errors.items()):
            yield f"ginfer_http_stream_errors_total{_labels({'code': code})} {count}"
        yield from number("ginfer_http_requests_active", self.active, GAUGE)
        yield from number("ginfer_tool_calls_malformed_total", self.malformed_calls, COUNTER)
        yield from number(
            "ginfer_http_connections_refused_total", self.refused_connections, COUNTER
        )


def number(name: str, value: float, kind: str) -> Iterator[str]:
    """Lines of one plain number."""
    yield f"# TYPE {name} {kind}"
    yield f"{name} {float(value):.17g}"


def render_engine(stats: Mapping[str, Any]) -> Iterator[str]:
    """Lines for the engine's snapshot: numbers, counters per kind, histograms."""
    for key, value in _flat(stats):
        base = f"ginfer_engine_{key.removesuffix(SECONDS)}"
        name = f"{base}_seconds" if key.endswith(SECONDS) else base
        if isinstance(value, dict) and "bounds" in value:
            yield from _histogram(name, value)
        elif key == "memory":
            yield f"# TYPE {name}_bytes gauge"
            for use, nbytes in value.items():
                yield f"{name}_bytes{_labels({'use': use})} {nbytes}"
        elif isinstance(value, dict):
            yield f"# TYPE {name}_total counter"
            for kind, count in sorted(value.items()):
                yield f"{name}_total{_labels({LABELS.get(key, 'code'): kind})} {count}"
        elif isinstance(value, int | float):
            total = key in TOTALS
            yield from number(f"{name}_total" if total else name, value, _kind(total))


def _flat(stats: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and value, those of a group under its name."""
    for key, value in stats.items():
        if key in GROUPS:
            yield from ((f"{key}_{name}", number) for name, number in value.items())
        else:
            yield key, value


def _kind(total: bool) -> str:
    return COUNTER if total else GAUGE


def _histogram(name: str, value: Mapping[str, Any]) -> Iterator[str]:
    yield f"# TYPE {name} {HISTOGRAM}"
    seen = 0
    for bound, count in zip([*value["bounds"], None], value["counts"], strict=True):
        seen += count
        le = "+Inf" if bound is None else f"{bound:g}"
        yield f"{name}_bucket{_labels({'le': le})} {seen}"
    yield f"{name}_sum {value['sum']:.17g}"
    yield f"{name}_count {value['count']}"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{k}="{_escape(v)}"' for k, v in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
