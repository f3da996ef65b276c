"""Tokenizer folders: what is read of them, and what is said of broken ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.config import TokenSettings
from extproc.errors import ConfigError
from extproc.tokens import folder as folders_of
from extproc.tokens import settings as settings_of
from extproc.tokens.cache import TokenCache
from extproc.tokens.encoder import Encoder
from extproc.tokens.folder import Added
from tests.unit.tokens import folders


def written(path: Path, **settings: Any) -> Path:
    """A whole folder, but with the template in its configuration only."""
    folders.write(path, folders.byte_level(), settings=settings)
    (path / "chat_template.jinja").unlink()
    return path


def test_template_files_go_before_the_configuration(tmp_path: Path) -> None:
    """As in `transformers`; further files are named templates."""
    folders.write(tmp_path, folders.byte_level(), "from a file", {"chat_template": "from the configuration"})
    assert folders_of.read(tmp_path).templates == {"default": "from a file"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert folders_of.read(tmp_path).templates == {"default": "from a file", "tool_use": "with tools"}


def test_a_configuration_may_have_one_template_or_several(tmp_path: Path) -> None:
    """Older files list names and texts."""
    assert folders_of.read(written(tmp_path / "a", chat_template="one")).templates == {"default": "one"}
    several = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    found = folders_of.read(written(tmp_path / "b", chat_template=several))
    assert found.templates == {"default": "one", "tool_use": "two"}


def test_special_tokens_are_texts_or_objects(tmp_path: Path) -> None:
    """`special_tokens_map.json` counts only beside a configuration that lists no added tokens."""
    folders.write(
        tmp_path,
        folders.byte_level(),
        settings={"pad_token": {"content": "<p>"}, "unk_token": None, "add_bos_token": True},
    )
    (tmp_path / "special_tokens_map.json").write_text('{"sep_token": "<s>"}')
    named = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "pad_token": "<p>", "sep_token": "<s>"}
    assert folders_of.read(tmp_path).special == named
    folders.write(tmp_path, folders.byte_level(), settings={"added_tokens_decoder": {"9": {"content": "<n>"}}})
    found = folders_of.read(tmp_path)
    assert "sep_token" not in found.special
    assert found.added == (Added("<n>"),)


def test_tokens_that_only_the_configuration_knows_are_added(tmp_path: Path) -> None:
    """In the order of their ids, then the named ones: each becomes the next id, as in `transformers`."""
    listed = {"20": {"content": "<second>", "special": True}, "3": {"content": "<first>", "special": True}}
    settings = {"added_tokens_decoder": listed, "mask_token": "<named>"}
    encoder = Encoder(
        folders_of.read(folders.write(tmp_path, folders.byte_level(), settings=settings)), TokenCache(1 << 20)
    )
    ids, _ = encoder.encode("<first><second><named>", special_tokens=False)
    size = folders.byte_level().get_vocab_size()
    assert ids.tolist() == [size, size + 1, size + 2]


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("tokenizer.json", "has no tokenizer.json: copy the model's own there"),
        ("chat_template.jinja", "has no chat template: add chat_template.jinja"),
    ],
)
def test_a_missing_file_is_named_with_its_remedy(tmp_path: Path, missing: str, told: str) -> None:
    """Before anything is served."""
    (folders.write(tmp_path, folders.byte_level()) / missing).unlink()
    with pytest.raises(ConfigError, match=told):
        folders_of.read(tmp_path)
    for source in ("local", "auto"):
        mistake = settings_of.mistake(TokenSettings(source=source, tokenizer=str(tmp_path)))
        assert mistake is not None
        assert mistake[0] == "tokenizer"
        assert told in mistake[1]


@pytest.mark.parametrize("text", ["{", "[]", '{"chat_template": "x", "added_tokens_decoder": {"x": {"content": "y"}}}'])
def test_a_broken_configuration_is_named(tmp_path: Path, text: str) -> None:
    """The file's name is in the error."""
    (folders.write(tmp_path, folders.byte_level()) / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        folders_of.read(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    """What cannot be read, and what gives other ids each time."""
    (folders.write(tmp_path, folders.byte_level()) / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Encoder(folders_of.read(tmp_path), TokenCache(1 << 20))
    plain = json.loads(folders.byte_level().to_str())
    plain["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match="other ids each time"):
        Encoder(folders_of.read(tmp_path), TokenCache(1 << 20))


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        (TokenSettings(), None),
        (TokenSettings(source="engine", tokenizer="/nowhere"), None),
        (TokenSettings(source="render"), ("url", "is missing")),
        (TokenSettings(source="render", url="http://x"), None),
        (TokenSettings(source="local"), ("tokenizer", "is missing")),
        (TokenSettings(source="local", tokenizer="/nowhere"), ("tokenizer", "/nowhere is no folder")),
        (TokenSettings(tokenizer="/nowhere"), ("tokenizer", "/nowhere is no folder")),
    ],
)
def test_sources_that_lack_something_are_mistakes(settings: TokenSettings, mistake: tuple[str, str] | None) -> None:
    """`warmpath check` names the key and what to write."""
    found = settings_of.mistake(settings)
    if mistake is None or found is None:
        assert found == mistake
        return
    assert found[0] == mistake[0]
    assert found[1].startswith(mistake[1])


def test_without_the_packages_local_is_a_mistake_and_auto_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are an extra: the error names it."""
    folder = str(folders.write(tmp_path, folders.byte_level()))
    monkeypatch.setattr("extproc.tokens.folder._PACKAGES", ("a_package_that_is_not_there",))
    mistake = settings_of.mistake(TokenSettings(source="local", tokenizer=folder))
    assert mistake is not None
    assert "pip install warmpath[tokenizers]" in mistake[1]
    assert settings_of.mistake(TokenSettings(tokenizer=folder)) is None
    assert settings_of.chosen(TokenSettings(tokenizer=folder)) == "engine"


def test_auto_takes_the_first_source_that_is_configured() -> None:
    """A folder, else a render server, else the engines."""
    assert settings_of.chosen(TokenSettings(tokenizer="x", url="http://x")) == "local"
    assert settings_of.chosen(TokenSettings(url="http://x")) == "render"
    assert settings_of.chosen(TokenSettings()) == "engine"
    assert settings_of.chosen(TokenSettings(source="engine", tokenizer="x")) == "engine"
