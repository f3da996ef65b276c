"""Renders what of an engine's answer no client gets to see: headers that speak for this gateway."""

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Mutation
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation, Mutations
from envoy_data_plane.envoy.extensions.filters.http.upstream_codec.v3 import UpstreamCodec
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any

from extproc.envoy.contract import DESTINATION

_INTERNAL = ("x-warmpath-", DESTINATION, "x-envoy-")
"""What the names of internal headers begin with."""


def answer_filters() -> list[HttpFilter]:
    """Filters of a pool's cluster: they see answers of engines alone, so our own reasons stay."""
    removals = [
        Mutation(remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=prefix)))
        for prefix in _INTERNAL
    ]
    strip = HeaderMutation(mutations=Mutations(response_mutations=removals, response_trailers_mutations=removals))
    return [
        HttpFilter(name="envoy.filters.http.header_mutation", typed_config=Any.pack(strip)),
        HttpFilter(name="envoy.filters.http.upstream_codec", typed_config=Any.pack(UpstreamCodec())),
    ]
