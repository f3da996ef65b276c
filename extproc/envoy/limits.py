"""What one process takes on, for all paths and for single ones."""

import msgspec

from extproc.config_gateway import BodyMode, GatewayRoute


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one process takes on.

    Attributes:
        body_mode: mode assumed for a gateway that does not name its own.
        fail_open: a fault of ours lets the request go on without a pick; otherwise it is answered 500.
        max_body_bytes: largest request body; a larger one is answered 413.
        routes: paths with a `fail_open` or `max_body_bytes` of their own, for themselves and what lies below them.
        max_held_bytes: duplex bodies held at once by all streams; past it a request is answered 429.
    """

    body_mode: BodyMode = "buffered"
    fail_open: bool = True
    max_body_bytes: int = 32 * 1024 * 1024
    routes: tuple[GatewayRoute, ...] = ()
    max_held_bytes: int = 512 * 1024 * 1024

    def fails_open(self, path: str) -> bool:
        """Whether a fault of ours lets a request for this path go on."""
        route = self._route(path) if self.routes else None
        return self.fail_open if route is None or route.fail_open is None else route.fail_open

    def largest_body(self, path: str) -> int:
        """Bytes of the largest body that this path takes.

        Envoy looks at a path's own limit only when it has to buffer: what fits into one read passes it.
        """
        route = self._route(path) if self.routes else None
        return self.max_body_bytes if route is None or route.max_body_bytes is None else route.max_body_bytes

    def _route(self, path: str) -> GatewayRoute | None:
        """The rules of a path: of several, those of the longest, as Envoy chooses them."""
        bare = path.partition("?")[0]
        found = [each for each in self.routes if bare == (at := each.path.rstrip("/")) or bare.startswith(f"{at}/")]
        return max(found, key=lambda each: len(each.path.rstrip("/")), default=None)
