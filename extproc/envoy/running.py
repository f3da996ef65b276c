"""Access-log entries of requests that run and have time limits."""

from envoy.data.accesslog.v3 import accesslog_pb2

from extproc.envoy.contract import EMITTED_TAG, FIRST_LIMIT, METADATA, SENT_TAG, STALL_LIMIT, Running
from extproc.envoy.replies import CHARGE_KEY, POOL_KEY


def running_from(entry: accesslog_pb2.HTTPAccessLogEntry) -> Running | None:
    """One running request; None for one that nobody watches.

    Only what is needed: an entry comes twice a second for every such request.

    Raises:
        ValueError: a custom tag is no number; the text names it.
    """
    common = entry.common_properties
    namespaces = common.metadata.filter_metadata
    if METADATA not in namespaces:
        return None
    ours, tags = namespaces[METADATA].fields, common.custom_tags
    emitted = tags.get(EMITTED_TAG, "")
    limits = [ours[key].number_value if key in ours else 0.0 for key in (FIRST_LIMIT, STALL_LIMIT)]
    if not emitted or not any(limits) or CHARGE_KEY not in ours:
        return None
    at = _number(EMITTED_TAG, emitted)
    age_s, sent = -1.0, tags.get(SENT_TAG, "")
    if sent and sent != "-":
        began = common.start_time.seconds + common.start_time.nanos / 1e9
        age_s = at - began - _number(SENT_TAG, sent) / 1e6
    return Running(
        charge_id=ours[CHARGE_KEY].string_value,
        pool=ours[POOL_KEY].string_value,
        kind=ours["kind"].string_value if "kind" in ours else "",
        attempt=common.upstream_request_attempt_count,
        sent_bytes=entry.response.response_body_bytes,
        at=at,
        age_s=age_s,
        first_token_s=limits[0],
        stall_s=limits[1],
    )


def _number(tag: str, text: str) -> float:
    whole, _, part = text.partition(".")
    if not text.isascii() or not (whole + part).isdigit():
        raise ValueError(f"custom tag {tag} is not a number")
    return float(text)
