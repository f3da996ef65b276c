"""`/v1/models`: the models that clients may ask for, answered here: an engine would list its own, by its own names."""

import json
from collections.abc import Callable, Iterable
from urllib.parse import unquote

from extproc.config import Config
from extproc.envoy.contract import Answered, Call, Decider, Decision
from extproc.errors import UnknownModelError

_PATH = "/v1/models"
_METHODS = frozenset({"GET", "HEAD"})


class ModelList:
    """A decider that answers for the list itself and asks another one about everything else."""

    def __init__(self, decider: Decider, config: Callable[[], Config]) -> None:
        """`config` gives the configuration that is in use."""
        self._decider = decider
        self._config = config

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`.

        Raises:
            Answered: the call asks for the list, or for one model of it.
            UnknownModelError: it asks for a model that nobody may ask for.
        """
        if call.method in _METHODS and call.path.startswith(_PATH):
            body = listed(call.path, names_of(self._config()))
            if body is not None:
                raise Answered(body)
        return await self._decider.decide(call)

    async def served(self, decision: Decision, served: str) -> None:
        """See `Decider.served`."""
        await self._decider.served(decision, served)

    async def settle(self, decision: Decision, served: str = "") -> None:
        """See `Decider.settle`."""
        await self._decider.settle(decision, served)


def names_of(config: Config) -> list[str]:
    """All names that clients may ask for models by."""
    return [name for own, model in config.models.items() for name in (own, *model.aliases)]


def listed(path: str, models: Iterable[str]) -> bytes | None:
    """The list in OpenAI's form, sorted by name, or one model of it.

    Args:
        path: of the call, with its query.
        models: names that clients may ask for.

    Returns:
        None when the path is another one.

    Raises:
        UnknownModelError: the path names a model that is none of them.
    """
    bare = path.partition("?")[0].rstrip("/")
    if bare == _PATH:
        return json.dumps({"object": "list", "data": [_model(name) for name in sorted(models)]}).encode()
    if not bare.startswith(f"{_PATH}/"):
        return None
    name = unquote(bare.removeprefix(f"{_PATH}/"))
    if name not in models:
        raise UnknownModelError("the model that the path names is not served here: GET /v1/models lists those that are")
    return json.dumps(_model(name)).encode()


def _model(name: str) -> dict[str, str | int]:
    # OpenAI's clients need `created`; nobody here knows when a model was made.
    return {"id": name, "object": "model", "created": 0, "owned_by": "warmpath"}
