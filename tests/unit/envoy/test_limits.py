"""Limits of single paths, chosen as Envoy chooses its routes."""

import pytest

from extproc.config_gateway import GatewayRoute
from extproc.envoy.limits import Limits

LIMITS = Limits(
    fail_open=True,
    max_body_bytes=1000,
    routes=(
        GatewayRoute(path="/v1/", fail_open=False),
        GatewayRoute(path="/v1/embeddings", max_body_bytes=100),
        GatewayRoute(path="/v1/embeddings/open", fail_open=True, max_body_bytes=10),
    ),
)


@pytest.mark.parametrize(
    ("path", "fails_open", "largest"),
    [
        ("/", True, 1000),
        ("/v1", False, 1000),
        ("/v1/", False, 1000),
        ("/v1x", True, 1000),
        ("/v1/chat/completions?x=/v1/embeddings", False, 1000),
        ("/v1/embeddings", True, 100),
        ("/v1/embeddings?x", True, 100),
        ("/v1/embeddings/x", True, 100),
        ("/v1/embeddingsx", False, 1000),
        ("/v1/embeddings/open/x", True, 10),
    ],
)
def test_the_longest_path_decides_alone(path: str, fails_open: bool, largest: int) -> None:
    """What a path's own rules leave out comes from the gateway, not from a shorter path: routes are not nested."""
    assert (LIMITS.fails_open(path), LIMITS.largest_body(path)) == (fails_open, largest)


def test_without_routes_all_paths_are_alike() -> None:
    """The defaults hold."""
    assert Limits(fail_open=False).fails_open("/v1") is False
    assert Limits(max_body_bytes=7).largest_body("/v1") == 7


def test_a_route_for_everything_matches_everything() -> None:
    """`/` is the shortest path."""
    limits = Limits(fail_open=True, routes=(GatewayRoute(path="/", fail_open=False),))
    assert not any(limits.fails_open(path) for path in ("/", "/x", "/v1/chat/completions"))
