"""`warmpath.yaml`: what loads, and how each mistake is told."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from extproc.config import Config, Gateway
from extproc.config_file import MAX_FILE_BYTES, load, loads
from extproc.errors import ConfigError

ROOT = Path(__file__).parents[3]
BROKEN = sorted((Path(__file__).parent / "broken").glob("*.yaml"))
SHIPPED = [ROOT / "warmpath.yaml", *sorted((ROOT / "docker").glob("*warmpath*.yaml")), ROOT / "docker" / "vllm.yaml"]
SMALLEST = 'models: {m: {pool: p}}\npools: {p: {endpoints: ["10.0.0.1:8000"]}}\n'


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_each_mistake_is_told_with_its_place_and_remedy(path: Path) -> None:
    """The first line of a broken file says what the error must contain: line, path, what was found, what to write."""
    wanted = path.read_text().splitlines()[0].removeprefix("# expect: ")
    with pytest.raises(ConfigError) as caught:
        load(path)
    told = str(caught.value)
    assert f"{path}{wanted}" in told
    assert "\n" not in told


def test_there_are_broken_files() -> None:
    """The folder is found, so the test above cannot pass by testing nothing."""
    assert len(BROKEN) >= 25


def test_the_smallest_file_gets_every_default() -> None:
    """Only models and pools are needed."""
    config = loads(SMALLEST)
    assert config == Config(models=config.models, pools=config.pools)
    assert config.gateway == Gateway()
    assert config.policy_of("p") == "predicted_ttft"


def test_the_example_shows_the_defaults_and_every_section() -> None:
    """`warmpath.yaml` is documentation: a default that changes must change there as well."""
    config = load(ROOT / "warmpath.yaml")
    assert config == Config(models=config.models, pools=config.pools)
    text = (ROOT / "warmpath.yaml").read_text()
    assert all(f"\n{section}:" in text for section in Config.__struct_fields__)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files_load(path: Path) -> None:
    """Every configuration that is handed out is right."""
    assert load(path).models


def test_merge_keys_let_pools_share_settings() -> None:
    """YAML's `<<` is not taken for a repeated or unknown key."""
    text = """
models: {m: {pool: a}}
pools:
  a: &shared {endpoints: ["10.0.0.1:8000"], kv_tokens: 5}
  b: {<<: *shared, endpoints: ["10.0.0.2:8000"]}
"""
    pools = loads(text).pools
    assert (pools["b"].kv_tokens, pools["b"].endpoints) == (5, ["10.0.0.2:8000"])


def test_a_missing_file_is_named() -> None:
    """The error names the file and the option."""
    with pytest.raises(ConfigError, match=r"/nowhere/warmpath.yaml: cannot be read .*--config"):
        load(Path("/nowhere/warmpath.yaml"))


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """The error says at which byte."""
    path = tmp_path / "warmpath.yaml"
    path.write_bytes(b"models: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 8"):
        load(path)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    """Nobody means to configure with 4 MiB."""
    path = tmp_path / "warmpath.yaml"
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load(path)


@pytest.mark.parametrize("text", ["[" * 5000, "a: " + "{a: " * 3000, "x: &a [*a, *a]", "\x00", "a: 'b"])
def test_hostile_yaml_is_a_plain_error(text: str) -> None:
    """Deep nesting, self-reference and control characters end in a ConfigError, not in a crash."""
    with pytest.raises(ConfigError):
        loads(text)


def _told(text: str) -> str:
    """The error of a text; `<text>` alone when it loads. Anything but a ConfigError goes through."""
    try:
        loads(text)
    except ConfigError as error:
        return str(error)
    return "<text>"


@given(st.text(alphabet=st.sampled_from("models: pools{}[]\n-&*!<\"'#019.aé"), max_size=80))
def test_any_text_loads_or_is_a_config_error(text: str) -> None:
    """No text raises anything else, whatever it is."""
    assert _told(text).startswith("<text>")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from(Config.__struct_fields__), _VALUES)
def test_any_value_of_a_section_loads_or_is_a_config_error(section: str, value: object) -> None:
    """What the walk over types accepts, the conversion accepts as well: no mistake falls between the two."""
    whole = {**yaml.safe_load(SMALLEST), section: value}
    assert _told(yaml.safe_dump(whole, allow_unicode=True)).startswith("<text>")
