"""`/v1/models`, answered without an engine."""

import json

import pytest

from extproc.envoy.contract import Answered, Call, Decision
from extproc.errors import UnknownModelError
from extproc.model_list import ModelList, listed, names_of
from tests.unit.top.parts import config

MODELS = {"b": {"pool": "main"}, "a/x": {"pool": "main", "served_as": "else"}}


class Other:
    """The decider behind it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.told: list[str] = []

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`."""
        self.calls.append(call)
        return Decision("main")

    async def served(self, decision: Decision, served: str) -> None:
        """See `Decider.served`."""
        self.told.append(f"served {decision.pool} {served}")

    async def settle(self, decision: Decision, served: str = "") -> None:
        """See `Decider.settle`."""
        self.told.append(f"settle {decision.pool} {served}")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/v1/models?limit=1"])
def test_all_names_are_listed_in_order(path: str) -> None:
    """The names that clients use, not those of engines, in the form that OpenAI documents."""
    told = json.loads(listed(path, MODELS) or b"")
    assert told["object"] == "list"
    assert [one["id"] for one in told["data"]] == ["a/x", "b"]
    assert {(one["object"], one["owned_by"], one["created"]) for one in told["data"]} == {("model", "warmpath", 0)}


@pytest.mark.parametrize("path", ["/v1/models/a/x", "/v1/models/a%2Fx", "/v1/models/a%2fx/?y"])
def test_one_model_is_told_alone(path: str) -> None:
    """Names of models have slashes, which clients may or may not encode."""
    assert json.loads(listed(path, MODELS) or b"")["id"] == "a/x"


def test_a_model_that_is_not_served_is_none() -> None:
    """The name is not repeated: it may be anything."""
    with pytest.raises(UnknownModelError) as caught:
        listed("/v1/models/secret-name", MODELS)
    assert "secret-name" not in str(caught.value)


@pytest.mark.parametrize("path", ["/v1/modelsx", "/v1/model", "/", "/v2/models", "/x/v1/models"])
def test_other_paths_are_not_its_own(path: str) -> None:
    """They go on to the decider behind it."""
    assert listed(path, MODELS) is None


def test_aliases_are_names_like_any_other() -> None:
    """Clients find a model by each of its names."""
    told = names_of(config(models={"b": {"pool": "main", "aliases": ["gpt", "gpt-4"]}, "a": {"pool": "main"}}))
    assert [one["id"] for one in json.loads(listed("/v1/models", told) or b"")["data"]] == ["a", "b", "gpt", "gpt-4"]
    assert json.loads(listed("/v1/models/gpt", told) or b"")["id"] == "gpt"


async def test_only_reading_is_answered() -> None:
    """All other calls are decided, and what becomes of them is passed on."""
    other = Other()
    models = ModelList(other, lambda: config(models=MODELS))
    for method in ("GET", "HEAD"):
        with pytest.raises(Answered) as caught:
            await models.decide(Call(method, "/v1/models", {}))
        assert json.loads(caught.value.body)["object"] == "list"
    for method, path in (("POST", "/v1/models"), ("DELETE", "/v1/models/b"), ("GET", "/v1/modelsx"), ("GET", "/")):
        assert await models.decide(Call(method, path, {})) == Decision("main")
    await models.served(Decision("main"), "10.0.0.1:80")
    await models.settle(Decision("main"), "10.0.0.1:80")
    assert len(other.calls) == 4
    assert other.told == ["served main 10.0.0.1:80", "settle main 10.0.0.1:80"]


async def test_the_list_follows_the_configuration() -> None:
    """A model that was added while it runs can be asked for, so it is listed."""
    current = [config(models=MODELS)]
    models = ModelList(Other(), lambda: current[0])
    current[0] = config(models={"new": {"pool": "main"}})
    with pytest.raises(Answered) as caught:
        await models.decide(Call("GET", "/v1/models", {}))
    assert [one["id"] for one in json.loads(caught.value.body)["data"]] == ["new"]
