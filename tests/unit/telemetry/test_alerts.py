"""The alerts that are shipped: they name metrics, labels and values that exist, and docs/operating.md lists each."""

import importlib
import pkgutil
import re
import shutil
import subprocess
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml
from prometheus_client import CollectorRegistry

from extproc import errors, telemetry
from extproc.config_rollouts import ShadowMode
from extproc.envoy.counts import Counts as Streams
from extproc.fleet.kv_profile import Counts as Events
from extproc.fleet.kv_tally import Tally
from extproc.govern.queue import BANDS
from extproc.govern.stages import Stage
from extproc.telemetry.families import Families
from extproc.telemetry.limit_metrics import Told
from extproc.telemetry.metrics import Metrics, Outcome, ScrapeOutcome
from extproc.telemetry.overload_metrics import Left, Shed
from extproc.telemetry.relay_metrics import RelayMetrics, RelayOutcome
from extproc.telemetry.rollout_metrics import EVENTS, PHASES
from extproc.telemetry.shadow_metrics import ShadowOutcome

ROOT: Final = Path(__file__).parents[3]
ALERTS: Final = ROOT / "docker" / "alerts.yaml"
OPERATING: Final = ROOT / "docs" / "operating.md"
BEHAVIOUR: Final = Path(__file__).parent / "alerts_tests.yaml"

ADDED: Final = {"instance", "job", "process"}
"""Labels that Prometheus and the keeper's page add to every sample."""
ENVOYS: Final = {"envoy_cluster_name", "envoy_http_conn_manager_prefix"}
SEVERITIES: Final = {"critical", "warning", "info"}


def reasons(kind: type[errors.WarmpathError] = errors.WarmpathError) -> Iterator[str]:
    """Reasons of every error that answers a request."""
    yield kind.reason
    for each in kind.__subclasses__():
        yield from reasons(each)


VALUES: Final[dict[tuple[str, str], set[str]]] = {
    ("warmpath_time_limits_total", "stage"): set(typing.get_args(Stage)),
    ("warmpath_time_limit_calls_total", "outcome"): set(typing.get_args(Told)),
    ("warmpath_requests_total", "outcome"): set(typing.get_args(Outcome)),
    ("warmpath_overload_shed_total", "action"): set(typing.get_args(Shed)),
    ("warmpath_queue_left_total", "outcome"): set(typing.get_args(Left)),
    ("warmpath_queue_left_total", "class"): set(BANDS),
    ("warmpath_queue_requests", "class"): set(BANDS),
    ("warmpath_quota_taken_total", "unit"): {"requests", "tokens"},
    ("warmpath_relay_requests_total", "outcome"): set(typing.get_args(RelayOutcome)),
    ("warmpath_rollout_phase", "phase"): set(PHASES),
    ("warmpath_rollout_events_total", "what"): set(EVENTS),
    ("warmpath_shadow_requests_total", "outcome"): set(typing.get_args(ShadowOutcome)),
    ("warmpath_shadow_requests_total", "mode"): set(typing.get_args(ShadowMode)),
    ("warmpath_auth_requests_total", "outcome"): {"key", "token", "refused"},
    ("warmpath_scrapes_total", "outcome"): set(typing.get_args(ScrapeOutcome)),
    ("warmpath_exchange_anomalies_total", "kind"): set(Streams.__struct_fields__),
    ("warmpath_refusals_total", "reason"): set(reasons()),
    ("warmpath_kv_event_faults_total", "kind"): set(Events.__struct_fields__) | set(Tally.__struct_fields__),
    ("warmpath_token_prompts_total", "outcome"): {"ok"},
    ("envoy_cluster_membership_healthy", "envoy_cluster_name"): {"warmpath_workers"},
    ("up", "job"): {"warmpath"},
}
"""Values that a matcher may name; of Envoy's other labels a wire test asks Envoy itself."""


class Alert(msgspec.Struct, frozen=True, rename={"name": "alert", "lasting": "for"}, forbid_unknown_fields=True):
    """One rule, as Prometheus reads it."""

    name: str
    expr: str
    lasting: str
    labels: dict[str, str]
    annotations: dict[str, str]

    def __str__(self) -> str:
        return self.name


def read() -> list[Alert]:
    """Every rule of the file."""
    document = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    return [msgspec.convert(rule, Alert) for group in document["groups"] for rule in group["rules"]]


ALL: Final = read()
for_each = pytest.mark.parametrize("alert", ALL, ids=str)


def declared() -> dict[str, set[str]]:
    """Labels of every metric of workers, keepers and relays, by the name of its samples."""
    registries = [Metrics().families._registry, RelayMetrics("")._registry]
    for module in pkgutil.iter_modules(telemetry.__path__):
        if module.name.endswith("_metrics") and module.name != "relay_metrics":
            found = vars(importlib.import_module(f"extproc.telemetry.{module.name}"))
            for name, kind in found.items():
                if name.endswith("Metrics") and kind.__module__.endswith(module.name):
                    kind(Families(own := CollectorRegistry()))
                    registries.append(own)
    families: dict[str, set[str]] = {}
    for registry in registries:
        for name, collector in registry._names_to_collectors.items():
            labels = set(typing.cast("Any", collector)._labelnames)
            families[name] = labels | {"le"} if name.endswith("_bucket") else labels
    return families


DECLARED: Final = declared()


class Selected(typing.NamedTuple):
    """A metric in an expression, and its matchers: label, operator, value."""

    name: str
    matchers: list[tuple[str, str, str]]


_SELECTOR: Final = re.compile(r"(?<![\w$.\"])((?:warmpath|envoy)_\w+|up)\b(?:\{([^}]*)\})?(?!\s*\()")
_GROUPING: Final = re.compile(r"\b(?:by|without|on|group_left|group_right|ignoring)\s*\(([^)]*)\)")


def selected(expression: str) -> list[Selected]:
    """Metrics of an expression, with their matchers."""
    bare = _GROUPING.sub(" ", expression)
    return [
        Selected(name, re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers))
        for name, matchers in _SELECTOR.findall(bare)
    ]


def grouped(expression: str) -> Iterator[tuple[set[str], str]]:
    """Each `by (labels) (argument)`: its labels and its argument."""
    for found in re.finditer(r"\bby\s*\(([^)]*)\)\s*\(", expression):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(expression[end], 0)
            end += 1
        yield {name.strip() for name in found[1].split(",")}, expression[found.end() : end - 1]


def labels_of(metric: str) -> set[str]:
    """Labels that samples of a metric have."""
    if metric == "up":
        return {"instance", "job"}
    if metric.startswith("envoy_"):
        return ENVOYS | {"instance", "job"}
    return DECLARED[metric] | ADDED


def test_alerts_have_names_of_their_own() -> None:
    """No two alerts are called alike."""
    names = [alert.name for alert in ALL]
    assert sorted(names) == sorted(set(names))
    assert len(names) > 50


@for_each
def test_an_alert_says_how_bad_it_is_and_what_to_do(alert: Alert) -> None:
    """One of three severities, a line that says what is wrong, and sentences that say what to do."""
    assert re.fullmatch(r"Warmpath[A-Z][A-Za-z]+", alert.name)
    assert set(alert.labels) == {"severity"}
    assert alert.labels["severity"] in SEVERITIES
    assert re.fullmatch(r"\d+[smh]", alert.lasting)
    assert set(alert.annotations) == {"summary", "description"}
    assert alert.annotations["description"].endswith((".", "?"))
    assert len(alert.annotations["description"]) > 40
    assert len(alert.annotations["summary"]) <= 120


@for_each
def test_every_metric_and_label_of_an_alert_exists(alert: Alert) -> None:
    """Metrics are declared by the code, labels are theirs, and values are of their closed sets."""
    found = selected(alert.expr)
    assert found
    for metric, matchers in found:
        assert metric in DECLARED or metric == "up" or metric.startswith("envoy_"), metric
        for label, _, value in matchers:
            assert label in labels_of(metric), (metric, label)
            known = ENVOYS if metric.startswith("envoy_") and (metric, label) not in VALUES else set()
            if label not in known:
                assert set(value.split("|")) <= VALUES[metric, label], (metric, label, value)


@for_each
def test_alerts_group_by_labels_that_the_metrics_have(alert: Alert) -> None:
    """A group by a label that does not exist would lump everything together, and say nothing."""
    for labels, argument in grouped(alert.expr):
        for metric, _ in selected(argument):
            assert labels <= labels_of(metric), (metric, labels)


@for_each
def test_texts_name_only_labels_that_the_alert_has(alert: Alert) -> None:
    """A label that was aggregated away would be an empty place in the text."""
    groups = [labels for labels, _ in grouped(alert.expr)]
    have = groups[0] if groups else set.union(*(labels_of(metric) for metric, _ in selected(alert.expr)))
    if not groups and re.search(r"\b(sum|max|min|count)\s*\(", alert.expr):
        have = set()
    named = set(re.findall(r"\$labels\.(\w+)", "".join(alert.annotations.values())))
    assert named <= have


def test_the_docs_list_every_alert_and_no_other() -> None:
    """docs/operating.md is where an operator looks an alert up."""
    listed = set(re.findall(r"\bWarmpath[A-Z][a-z]+[A-Za-z]*", OPERATING.read_text(encoding="utf-8")))
    assert listed == {alert.name for alert in ALL}


def test_the_docs_name_only_metrics_that_exist() -> None:
    """What an operator is told to watch can be watched."""
    named = set(re.findall(r"\bwarmpath_[a-z_]+[a-z]\b", OPERATING.read_text(encoding="utf-8")))
    assert named
    assert named - {"warmpath_workers"} <= {*DECLARED, *(name.removesuffix("_bucket") for name in DECLARED)}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: package prometheus) is not installed")
@pytest.mark.parametrize("arguments", [("check", "rules", str(ALERTS)), ("test", "rules", str(BEHAVIOUR))])
def test_prometheus_reads_the_alerts_and_they_fire_when_they_should(arguments: tuple[str, ...]) -> None:
    """Prometheus's own tool: every expression is valid, and fires for the series of alerts_tests.yaml."""
    ran = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
