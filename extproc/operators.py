"""The operator API of one keeper: its calls, who may make them, and both ways in, HTTP and gRPC."""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
from aiohttp import web

from extproc.admin import rollout_pages, rollout_service
from extproc.admin.entry import Entry
from extproc.admin.rollouts import RolloutCalls
from extproc.admin.starting import Pools
from extproc.config import Config, Sidecar, split_address
from extproc.fleet.rollout_documents import Known
from extproc.state.store import Store

_ID_BYTES = 5


class Operators:
    """What operators may ask of a keeper."""

    def __init__(
        self,
        config: Config,
        store: Store,
        pools: Callable[[], Pools],
        remembered: Callable[[], Mapping[str, Known]],
    ) -> None:
        """Nothing is opened or read yet; arguments but `config`, the present one, as of `RolloutCalls`."""
        self._config = config
        self._calls = RolloutCalls(store, lambda: self._config, pools, remembered, lambda: secrets.token_hex(_ID_BYTES))

    def apply(self, config: Config) -> None:
        """Take a changed configuration."""
        self._config = config

    def pages(self) -> list[web.RouteDef]:
        """Pages for the admin address."""
        sidecar = self._config.gateway.sidecar
        return rollout_pages.routes(self._calls, Entry(_token(sidecar), split_address(sidecar.admin)[0]))

    def service(self) -> grpc.GenericRpcHandler:
        """Service for the keeper's gRPC address."""
        sidecar = self._config.gateway.sidecar
        host = "" if sidecar.socket_dir else sidecar.bind
        return rollout_service.handler(self._calls, Entry(_token(sidecar), host))


def _token(sidecar: Sidecar) -> Path | None:
    return Path(sidecar.admin_token) if sidecar.admin_token else None
