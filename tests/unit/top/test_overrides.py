"""`--set`: settings of the command line laid over the file's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ConfigError
from extproc.overrides import overlay
from tests.unit.top.parts import config

DOTTED = {
    "models": {"Qwen/Qwen2.5-7B": {"pool": "qwen-2.5"}, "m": {"pool": "qwen-2"}},
    "pools": {"qwen-2.5": {"endpoints": ["10.0.0.1:80"]}, "qwen-2": {"endpoints": ["10.0.0.2:80"]}},
}


def test_values_are_read_as_yaml_and_later_ones_win() -> None:
    """Numbers, texts, truth values and lists need no quotes of their own."""
    settings = [
        "redis.timeout_ms=5",
        "redis.timeout_ms=7",
        "gateway.fail_open=false",
        "pools.main.endpoints=[10.0.0.8:1, 10.0.0.9:1]",
        "redis.url=redis://h?db=1",
    ]
    changed = overlay(config(), settings)
    assert (changed.redis.timeout_ms, changed.gateway.fail_open) == (7, False)
    assert changed.pools["main"].endpoints == ["10.0.0.8:1", "10.0.0.9:1"]
    assert changed.redis.url == "redis://h?db=1"


def test_without_settings_nothing_changes() -> None:
    """The configuration of the file is used as it is."""
    before = config()
    assert overlay(before, []) is before


def test_names_may_hold_dots() -> None:
    """Pools and models are often named after versions: the longest name that exists is meant."""
    changed = overlay(config(**DOTTED), ["pools.qwen-2.5.kv_tokens=5", "models.Qwen/Qwen2.5-7B.pool=qwen-2"])
    assert changed.pools["qwen-2.5"].kv_tokens == 5
    assert changed.pools["qwen-2"].kv_tokens != 5
    assert changed.models["Qwen/Qwen2.5-7B"].pool == "qwen-2"


def test_a_pool_can_be_added_whole() -> None:
    """A name that is not there yet takes a whole value."""
    changed = overlay(config(), ["pools.more={endpoints: [10.0.0.5:1]}"])
    assert changed.pools["more"].endpoints == ["10.0.0.5:1"]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("redis.timeout_ms", "write it as section.key=value"),
        ("=5", "write it as section.key=value"),
        ("redi.timeout_ms=5", "--set redi.timeout_ms: there is no section `redi`"),
        ("redis.timeout_ms.x=5", "there is no section `timeout_ms`"),
        ("redis.timeout=5", "--set redis.timeout: unknown key"),
        ("redis.timeout_ms=soon", "--set redis.timeout_ms: found 'soon': write a whole number"),
        ("telemetry.log_level=[", "--set telemetry.log_level: the value is not valid YAML"),
        ("telemetry.log_level=2001-99-99", "--set telemetry.log_level: the value is not valid YAML"),
        ("telemetry.log_level=" + "[" * 5000, "--set telemetry.log_level: the value is not valid YAML"),
        ("models.m.pool=other", "--set models.m.pool: no pool `other`"),
        ("pools.main.endpoints=[10.0.0.1:99999]", "a port lies between 1 and 65535"),
        ("retries.max_ms=1", "below retries.base_ms"),
        ("redis=null", "--set redis: "),
    ],
)
def test_a_mistake_is_told_with_its_path(setting: str, told: str) -> None:
    """A setting that a file could not hold is refused here as well, by the same rules."""
    with pytest.raises(ConfigError) as caught:
        overlay(config(), [setting])
    assert told in str(caught.value)


@given(
    password=st.text("abcdefghijkq", min_size=12),
    form=st.sampled_from(
        [
            "redis.url=http://:{}@h",
            "redis.url=[redis://:{}@h",
            "redis.url=redis://:{}@h: x: y",
            "routing.session.secret={{{}: 1}}",
            "routing.session.secret='{}",
        ]
    ),
)
def test_secrets_are_not_repeated(password: str, form: str) -> None:
    """Neither the setting that is wrong nor a right one beside it shows its value."""
    for settings in ([form.format(password)], [f"redis.url=redis://:{password}@h", "redis.timeout_ms=x"]):
        with pytest.raises(ConfigError) as caught:
            overlay(config(), settings)
        assert password not in str(caught.value)
        assert caught.value.__cause__ is None
