"""Alerts that watch Envoy name metrics and labels that a real Envoy has, under the configuration that makes them."""

import contextlib
import re
import shutil
import tempfile
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from extproc.config import Config, Gateway, Model, Pool, RateLimits, Sidecar
from extproc.config_gateway import Tls
from tests.certificates import Authority
from tests.ports import free_port
from tests.unit.telemetry.test_alerts import ALL, selected
from tests.wire.envoy import running_envoy
from tests.wire.standins import Keeper

POOL = "127.0.0.1:1"


async def test_every_metric_of_envoy_in_an_alert_is_on_its_page() -> None:
    """With TLS and a limit of requests a second, whose metrics are not there without."""
    folder = Path(tempfile.mkdtemp(prefix="wp-"))
    pair = Authority(folder).issue("127.0.0.1")
    config = Config(
        models={"m": Model(pool="main")},
        pools={"main": Pool(endpoints=[POOL])},
        rate_limits=RateLimits(local_requests_per_s=100),
        gateway=Gateway(
            tls=Tls(certificate=str(pair.certificate), key=str(pair.key)),
            listen=f"127.0.0.1:{free_port()}",
            admin=f"127.0.0.1:{free_port()}",
            sidecar=Sidecar(socket_dir=str(folder), workers=1),
        ),
    )
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        keeper = Keeper([POOL])
        await keeper.start(f"{folder}/keeper.sock")
        cleanup.push_async_callback(keeper.stop)
        envoy = await cleanup.enter_async_context(running_envoy(config))
        page = await envoy.get("/stats/prometheus")
    samples: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            # The parser adds what Prometheus does not: Envoy writes counters without `_total`.
            name = sample.name if re.search(rf"^{sample.name}\b", page, re.MULTILINE) else family.name
            samples.setdefault(name, []).append(sample.labels)
    watched = [found for alert in ALL for found in selected(alert.expr) if found.name.startswith("envoy_")]
    assert len(watched) > 10
    for name, matchers in watched:
        assert name in samples, name
        assert any(_matches(matchers, labels) for labels in samples[name]), (name, matchers)


def _matches(matchers: list[tuple[str, str, str]], labels: dict[str, str]) -> bool:
    """Whether labels are all there, and as the matchers of Prometheus want them."""

    def holds(label: str, operator: str, value: str) -> bool:
        found = labels.get(label)
        if found is None:
            return False
        alike = found == value if operator in {"=", "!="} else re.fullmatch(value, found) is not None
        return alike != operator.startswith("!")

    return all(holds(*each) for each in matchers)
