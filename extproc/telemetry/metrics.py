"""Every metric of Warmpath, declared once, with what records it cheaply.

`prometheus_client` on a registry of its own holds the numbers. A request records 20 samples; with these pre-bound
children that takes 16 µs of CPU in all, where the OpenTelemetry SDK (1.45) takes 6 µs for each one.

Labels come from closed sets: pools, endpoints and policies of the configuration, outcomes and reasons of this
package. As access-log entries name pools and endpoints too, each family is capped all the same: past
`MAX_SERIES` label sets, new ones are counted under `other`. No prompt, key or session is ever a label, and a
tenant only as a rule of the configuration names it.
"""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from extproc.telemetry.exact_metrics import ExactMetrics, Rung
from extproc.telemetry.families import Families, WithoutCreated
from extproc.telemetry.feed_metrics import FeedMetrics
from extproc.telemetry.kv_metrics import KvMetrics
from extproc.telemetry.store_metrics import StoreMetrics
from extproc.telemetry.token_metrics import TokenMetrics

SessionOutcome = Literal["none", "new", "pinned", "moved"]
Outcome = Literal["ok", "client_error", "engine_error", "cut", "disconnected", "no_answer", "time_limit"]
CUT: Final = frozenset({"UF", "UC", "UR", "UPE"})
"""Envoy's response flags of a connection to the engine that failed, ended early or was reset, or that spoke no HTTP."""
GONE: Final = frozenset({"DC", "DPE", "DR"})
"""Envoy's response flags of a client that closed its connection, broke the protocol, or reset its stream (HTTP/2)."""
UsageSource = Literal["engine", "asked", "counted", "none"]
"""Where the tokens of an answer are known from: the engine's report, one that Warmpath asked for on a stream, the bytes
of the answer, or nowhere."""
ScrapeOutcome = Literal["read", "unreadable", "silent", "unreachable"]
ScrapedPage = Literal["load", "about"]

# Decisions take tens of microseconds to a few milliseconds; first tokens milliseconds to minutes.
_DECISION_S = (50e-6, 100e-6, 150e-6, 250e-6, 400e-6, 600e-6, 1e-3, 1.5e-3, 2.5e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1)
_TTFT_S = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 60.0)
_DURATION_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 900.0)
# What matters of a prediction: cached tokens within 5 % of the prompt, times within 20 %, and how far out the rest is.
_SHARE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
_RATIO = (0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0)


class Decided(msgspec.Struct, frozen=True, gc=False):
    """One decision that was made and charged.

    Attributes:
        pool: pool that serves the request.
        policy: policy that decided.
        session: what became of the session's pin.
        seconds: request known to decision made.
        predicted_cached_tokens: prompt tokens expected to be cached at the pick.
        best_cached_tokens: the most that any endpoint that may serve is expected to have cached; never less.
        unread: why the body could not be read, from a closed set; empty when it could or need not be.
        rung: how the prompt was matched with the pick.
    """

    pool: str
    policy: str
    session: SessionOutcome
    seconds: float
    predicted_cached_tokens: float = 0.0
    best_cached_tokens: float = 0.0
    unread: str = ""
    rung: Rung = "estimated"


class Finished(msgspec.Struct, frozen=True, gc=False):
    """One finished request as the access log told it; negative numbers are unknown.

    Attributes:
        pool: pool of the decision.
        endpoint: endpoint id that answered; empty when none did.
        outcome: how it ended.
        ttft_s: seconds to the first byte of the answer's body.
        duration_s: seconds from first byte in to last byte out.
        prompt_tokens: as the engine reported.
        cached_tokens: as the engine reported.
        output_tokens: as the engine reported.
        predicted_ttft_s: seconds to the first token, as the decision expected them of this endpoint.
        predicted_cached_tokens: as the decision expected them of this endpoint.
        usage: where its tokens are known from; None for one that has none.
        counted_output_tokens: by the bytes of the answer, where the engine did not report any.
    """

    pool: str
    endpoint: str
    outcome: Outcome
    ttft_s: float = -1.0
    duration_s: float = -1.0
    prompt_tokens: int = -1
    cached_tokens: int = -1
    output_tokens: int = -1
    predicted_ttft_s: float = -1.0
    predicted_cached_tokens: float = -1.0
    usage: UsageSource | None = None
    counted_output_tokens: float = -1.0


class EngineView(msgspec.Struct, frozen=True, gc=False):
    """What is shown of one endpoint's state; fields as in `state.endpoint.EndpointState`."""

    reachable: bool
    asleep: bool
    running: int
    waiting: int
    kv_usage: float
    scraped_at: float
    prefix_queries: float
    prefix_hits: float
    stalled_s: float = 0.0


class Metrics:
    """The metrics of one process. Make one in the composition root and pass it on.

    Methods are called in the event loop, never raise, and return at once.

    Attributes:
        store: what is recorded of the shared store.
        feed: what is recorded of the feed of profiles.
        exact: what is recorded of exact profiles.
        families: for the families that other parts declare.
        tokens: what is recorded of token ids.
        kv: what is recorded of KV events.
    """

    def __init__(self, version: str = "") -> None:
        """Declare every metric on a registry of this object's own; `version` is shown as `warmpath_build_info`."""
        self._registry = registry = CollectorRegistry(auto_describe=False)

        self.families = families = Families(registry)
        counter, gauge, histogram = families.counter, families.gauge, families.histogram
        self._decisions = counter("decisions_total", "Decisions made.", ("pool", "policy"))
        self._refusals = counter("refusals_total", "Requests refused before an engine.", ("reason",))
        self._sessions = counter("sessions_total", "Decisions by what became of the session.", ("pool", "outcome"))
        self._predicted = counter(
            "predicted_cached_tokens_total", "Prompt tokens expected in the picked engine's cache.", ("pool",)
        )
        self._best = counter(
            "best_cached_tokens_total", "Prompt tokens expected in the best engine's cache for them.", ("pool",)
        )
        self._forgone = counter(
            "forgone_cached_tokens_total", "Of these, computed again at a pick that had them not.", ("pool",)
        )
        self._unread = counter("unread_requests_total", "Requests whose body could not be read.", ("pool", "reason"))
        self._decision_s = histogram("decision_seconds", "Request known to decision made.", ("pool",), _DECISION_S)
        self._stage_s = histogram("decision_stage_seconds", "Parts of a decision.", ("stage",), _DECISION_S)
        self._in_flight = gauge("in_flight", "Requests decided and not yet ended.", ("pool",))
        self._fallbacks = counter("fallbacks_total", "Decisions below the top of the ladder.", ("pool", "rung"))
        self._fitted = counter("fitted_requests_total", "Bodies changed for their engine.", ("pool", "change"))
        self._anomalies = counter("exchange_anomalies_total", "Streams and log entries that went wrong.", ("kind",))

        self._requests = counter("requests_total", "Requests that ended.", ("pool", "outcome"))
        self._ttft_s = histogram("ttft_seconds", "Request sent to first body byte.", ("pool",), _TTFT_S)
        self._duration_s = histogram("request_duration_seconds", "First byte in to last out.", ("pool",), _DURATION_S)
        self._prompt = counter("prompt_tokens_total", "Prompt tokens, by the engine.", ("pool", "endpoint"))
        self._cached = counter("cached_tokens_total", "Of these, found in cache.", ("pool", "endpoint"))
        self._uncached = counter("uncached_tokens_total", "Of these, computed.", ("pool", "endpoint"))
        self._output = counter("output_tokens_total", "Generated tokens, by the engine.", ("pool", "endpoint"))
        self._usage = counter("usage_total", "Answers by where their tokens are known from.", ("pool", "source"))
        self._counted = counter(
            "counted_output_tokens_total", "Generated tokens, by bytes, of answers without usage.", ("pool", "endpoint")
        )
        self._cached_error = histogram(
            "cached_tokens_error_share", "Cached tokens, |expected - reported| / prompt.", ("pool",), _SHARE
        )
        self._ttft_ratio = histogram("ttft_ratio", "Time to first token, real / expected.", ("pool",), _RATIO)
        self._entries = counter("access_log_entries_total", "Access-log entries by use.", ("outcome",))
        self._rate = gauge("prefill_tokens_per_second", "Learnt prefill speed.", ("pool", "endpoint"))

        self.store, self.feed = StoreMetrics(families), FeedMetrics(families)
        self.tokens, self.exact, self.kv = TokenMetrics(families), ExactMetrics(families), KvMetrics(families)
        self._scrapes = counter("scrapes_total", "Scrapes of engines.", ("pool", "outcome"))
        self._faults = counter(
            "scrape_faults_total", "Pages of engines that could not be read.", ("pool", "page", "reason")
        )
        self._held = gauge("endpoints_held", "Endpoints that this keeper reads for all.", ("pool",))
        self._up = gauge("endpoint_up", "1 while the endpoint can be connected to.", ("pool", "endpoint"))
        self._stalled = gauge("engine_stalled_seconds", "Time that it stands still with work.", ("pool", "endpoint"))
        self._asleep = gauge("engine_asleep", "1 while the engine sleeps.", ("pool", "endpoint"))
        self._running = gauge("engine_running", "Requests in the engine's batch.", ("pool", "endpoint"))
        self._waiting = gauge("engine_waiting", "Requests in the engine's queue.", ("pool", "endpoint"))
        self._kv = gauge("engine_kv_usage", "Share of KV blocks in use.", ("pool", "endpoint"))
        self._scraped = gauge("engine_scraped_at_seconds", "Unix time of the last good scrape.", ("pool", "endpoint"))
        self._hit = gauge("engine_hit_share", "Prefix-cache hits by queried tokens.", ("pool", "endpoint"))
        self._of_endpoint = (
            self._rate, self._up, self._stalled, self._asleep, self._running, self._waiting, self._kv, self._scraped,
            self._hit,
        )  # fmt: skip
        gauge("build_info", "Version of this process.", ("version",)).at(version).set(1)

    def decided(self, decided: Decided) -> None:
        """A decision was made; the request is in flight until `settled`."""
        pool = decided.pool
        self._decisions.at(pool, decided.policy).inc()
        self._sessions.at(pool, decided.session).inc()
        self._decision_s.at(pool).observe(decided.seconds)
        if decided.best_cached_tokens > 0:
            self._predicted.at(pool).inc(decided.predicted_cached_tokens)
            self._best.at(pool).inc(decided.best_cached_tokens)
            self._forgone.at(pool).inc(max(0.0, decided.best_cached_tokens - decided.predicted_cached_tokens))
        self.exact.matched(pool, decided.rung)
        if decided.unread:
            self._unread.at(pool, decided.unread).inc()
        self._in_flight.at(pool).inc()

    def settled(self, pool: str) -> None:
        """A decided request is over."""
        self._in_flight.at(pool).dec()

    def stage(self, stage: str, seconds: float) -> None:
        """One part of a decision took this long."""
        self._stage_s.at(stage).observe(seconds)

    def refused(self, reason: str, requests: int = 1) -> None:
        """Requests were refused with an error's reason."""
        self._refusals.at(reason).inc(requests)

    def fell_back(self, pool: str, rung: str) -> None:
        """A decision was made with less than full knowledge."""
        self._fallbacks.at(pool, rung).inc()

    def fitted(self, pool: str, change: str, requests: int = 1) -> None:
        """Bodies were changed for their engine, for one reason."""
        self._fitted.at(pool, change).inc(requests)

    def anomaly(self, kind: str, streams: int = 1) -> None:
        """Ext_proc streams did what the phase table does not foresee, or log entries could not be read."""
        self._anomalies.at(kind).inc(streams)

    def access_log(self, outcome: str, entries: int = 1) -> None:
        """Access-log entries came in, and what was made of them."""
        self._entries.at(outcome).inc(entries)

    def finished(self, finished: Finished) -> None:
        """A request ended."""
        pool, endpoint = finished.pool, finished.endpoint
        self._requests.at(pool, finished.outcome).inc()
        if finished.ttft_s >= 0:
            self._ttft_s.at(pool).observe(finished.ttft_s)
        if finished.duration_s >= 0:
            self._duration_s.at(pool).observe(finished.duration_s)
        if finished.usage:
            self._usage.at(pool, finished.usage).inc()
        if finished.output_tokens >= 0:
            self._output.at(pool, endpoint).inc(finished.output_tokens)
        elif finished.counted_output_tokens >= 0:
            self._counted.at(pool, endpoint).inc(finished.counted_output_tokens)
        if finished.prompt_tokens >= 0:
            cached = min(max(finished.cached_tokens, 0), finished.prompt_tokens)
            self._prompt.at(pool, endpoint).inc(finished.prompt_tokens)
            self._cached.at(pool, endpoint).inc(cached)
            self._uncached.at(pool, endpoint).inc(finished.prompt_tokens - cached)
            if finished.predicted_cached_tokens >= 0 and finished.cached_tokens >= 0 and finished.prompt_tokens:
                error = abs(finished.predicted_cached_tokens - cached) / finished.prompt_tokens
                self._cached_error.at(pool).observe(error)
        if finished.ttft_s >= 0 and finished.predicted_ttft_s > 0:
            self._ttft_ratio.at(pool).observe(finished.ttft_s / finished.predicted_ttft_s)

    def prefill_rate(self, pool: str, endpoint: str, tokens_per_s: float) -> None:
        """The prefill speed learnt for an endpoint."""
        self._rate.at(pool, endpoint).set(tokens_per_s)

    def scraped(self, pool: str, outcome: ScrapeOutcome) -> None:
        """An engine was scraped."""
        self._scrapes.at(pool, outcome).inc()

    def scrape_fault(self, pool: str, page: ScrapedPage, reason: str) -> None:
        """A page of an engine could not be read; reasons are `engines.adapter.Fault`."""
        self._faults.at(pool, page, reason).inc()

    def held(self, pool: str, endpoints: int) -> None:
        """How many endpoints of a pool this keeper reads; of all keepers one reads each."""
        self._held.at(pool).set(endpoints)

    def engine(self, pool: str, endpoint: str, view: EngineView) -> None:
        """Show an endpoint's latest state."""
        self._up.at(pool, endpoint).set(float(view.reachable))
        self._stalled.at(pool, endpoint).set(view.stalled_s)
        self._asleep.at(pool, endpoint).set(float(view.asleep))
        self._running.at(pool, endpoint).set(view.running)
        self._waiting.at(pool, endpoint).set(view.waiting)
        self._kv.at(pool, endpoint).set(view.kv_usage)
        self._scraped.at(pool, endpoint).set(view.scraped_at)
        if view.prefix_queries > 0:
            self._hit.at(pool, endpoint).set(view.prefix_hits / view.prefix_queries)

    def forget(self, pool: str, endpoint: str) -> None:
        """Drop the gauges of an endpoint that left; its counters stay, as counters must."""
        for family in self._of_endpoint:
            family.drop(pool, endpoint)

    def page(self) -> bytes:
        """This process's metrics as a Prometheus text page, format 0.0.4, UTF-8."""
        return generate_latest(WithoutCreated(self._registry))


def outcome_of(status: int, flags: Sequence[str], stage: str = "") -> Outcome:
    """Outcome of a finished request.

    Args:
        status: HTTP status that was sent to the client; 0 when none was.
        flags: Envoy's response flags by their short names; those of `GONE` are the client's doing.
            https://www.envoyproxy.io/docs/envoy/latest/configuration/observability/access_log/usage
        stage: time limit that ended it; empty when none did.
    """
    if stage:
        return "time_limit"
    if GONE.intersection(flags):
        return "disconnected"
    if status == 0:
        return "no_answer"
    if status >= 500:
        return "engine_error"
    if CUT.intersection(flags):
        return "cut"
    return "client_error" if status >= 400 else "ok"
