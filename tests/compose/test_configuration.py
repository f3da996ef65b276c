"""What the stack is started with: our own configurations, and the flags of the real engines."""

import pytest
import yaml

from extproc.config_file import load
from tests.compose.stack import ROOT, compose_command, run

REPORTING_FLAGS = {
    "vllm": {"--enable-prefix-caching", "--enable-prompt-tokens-details"},
    "tensorrt-llm": {"--extra_llm_api_options=/etc/trtllm/options.yaml"},
}


def test_one_envoy_configuration_serves_simulated_and_real_engines() -> None:
    """Both configurations differ in models and endpoints alone, so envoy/envoy.yaml fits either."""
    simulated, real = load(ROOT / "docker/warmpath.yaml"), load(ROOT / "docker/vllm.yaml")
    assert simulated.gateway == real.gateway
    assert simulated.redis == real.redis
    assert list(simulated.pools) == list(real.pools)


def test_docker_waits_longer_than_a_sidecar_drains() -> None:
    """Docker's patience exceeds `drain_s`, or it would kill a replica whose streams may still finish."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    patience_s = float(services["sidecar-1"]["stop_grace_period"].removesuffix("s"))
    assert patience_s > load(ROOT / "docker/warmpath.yaml").gateway.sidecar.drain_s


def test_trtllm_options_switch_prometheus_metrics_on() -> None:
    """Without both switches trtllm-serve has no `/prometheus/metrics`, or one without load gauges."""
    options = yaml.safe_load((ROOT / "docker/trtllm-options.yaml").read_text())
    assert options["return_perf_metrics"] is True
    assert options["enable_iter_perf_stats"] is True


def test_mounted_files_can_be_read_by_every_user() -> None:
    """Containers run under ids that own nothing here: what is mounted must be readable by others."""
    for name in ("docker/warmpath.yaml", "docker/vllm.yaml", "redis/redis.conf", "envoy/envoy.yaml"):
        assert (ROOT / name).stat().st_mode & 0o004, name


@pytest.mark.compose
@pytest.mark.parametrize("profile", REPORTING_FLAGS)
def test_profile_starts_two_engines_that_report_what_routing_needs(profile: str) -> None:
    """Each profile is valid for this machine's Compose, and its engines get their flags and a GPU of their own."""
    services = yaml.safe_load(run(*compose_command(), "--profile", profile, "config"))["services"]
    engines = [services[f"{profile}-{number}"] for number in (1, 2)]
    assert all(REPORTING_FLAGS[profile] <= set(engine["command"]) for engine in engines)
    devices = [engine["deploy"]["resources"]["reservations"]["devices"][0] for engine in engines]
    assert [device["device_ids"] for device in devices] == [["0"], ["1"]]
