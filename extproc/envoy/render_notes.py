"""Comments for the rendered YAML, each above the line it explains."""

from collections.abc import Mapping

HEADER = """\
# Envoy's complete configuration, written by `warmpath envoy`: change warmpath.yaml and write it again.
# One listener; a request meets the filters in the order they stand here.
"""

NOTES: Mapping[str, str] = {
    "local_reply_config:": "Envoy's own errors, as JSON that OpenAI's clients can read; the sidecar's pass unchanged.",
    "early_header_mutation_extensions:": "Headers that only Warmpath may set: removed before anything reads them.",
    "- name: picked": "The sidecar named a pool: its cluster has the same name.",
    "- name: fallback": "No decision (sidecar gone, fail-open): the first model's pool, one session on one endpoint.",
    "retry_on: connect-failure,refused-stream,reset,": "Only until the first byte of an answer. 503 is an engine's "
    "full queue: the next may have room.",
    "hash_policy:": "First session header that is present; read when the sidecar named no endpoint.",
    "request_body_buffer_limit: ": "gateway.max_body_bytes, of unpacked bytes; one more is answered 413.",
    "max_request_headers_kb: ": "gateway.max_headers_kb.",
    "max_headers_count: ": "gateway.max_header_count.",
    "request_timeout: ": "gateway.receive_s: until the last byte of a request is there.",
    "- name: envoy.filters.http.header_mutation": "An engine's answer loses headers that speak for this gateway.",
    "overload_manager:": "gateway.max_connections and gateway.max_memory_mb, of all clients together.",
    "max_heap_size_bytes: ": "A quarter above gateway.max_memory_mb: the thresholds below are shares of this.",
    "- name: envoy.overload_actions.reset_high_memory_stream": "The largest requests that are being received go first.",
    "- name: envoy.load_shed_points.http1_server_abort_dispatch": "HTTP/1 streams are not reset: no more is read.",
    "max_stream_duration: ": "timeouts.request_s: first byte in to last byte out.",
    "stream_idle_timeout: ": "timeouts.stream_idle_s.",
    "- name: envoy.filters.http.decompressor": "Gzip bodies of requests are unpacked for sidecar and engine.",
    "max_inflate_ratio: ": "Deflate's own maximum: below it, Envoy passes a cut body on as if it were whole.",
    "- name: envoy.filters.http.ext_proc": "The sidecar. No byte of an answer passes through it.",
    "response_trailer_mode: ": "Keeps the stream open until the answer ends, so the sidecar learns of the end.",
    "disallowed_headers:": "Keys and cookies are no part of a decision and never leave Envoy.",
    "receiving_namespaces:": "What the sidecar may tell the router, the load balancer and the access log.",
    "- name: envoy.filters.http.ai_protocol_manager": "Reads `usage` of answers for the access log. Work in progress "
    "in Envoy 1.40: it says so with a warning when it starts.",
    "llm_protocol: ANTHROPIC_MESSAGES": "Its usage counts cached tokens apart.",
    "access_log:": "To a worker: one entry a finished request (who served, tokens, times), and one each half second "
    "while a request runs that is tried anew.",
    "access_log_flush_interval:": "How often running requests are looked at; the filters let only those through that "
    "are at a further attempt.",
    "- tag: first_body_us": "First body byte of the answer: the true time to first token of a stream.",
    "type: EDS": "Endpoints come from the keeper and change without a restart.",
    "idle_timeout: ": "timeouts.endpoint_idle_s, below the engine's keep-alive, or requests meet closing connections.",
    "retry_on: connect-failure,refused-stream,reset-before-request": "The next worker, when one refuses the stream.",
    "value: 1.0": "When no endpoint is healthy, try them all: slow health pages are no dead fleet.",
    "- header: x-gateway-destination-endpoint": "Ordered list: the first is tried first, a retry takes the next.",
    "selected_host_key:": "Tells the access log which of the list served.",
    "fallback_policy:": "Used when the list is missing or used up.",
    "- name: warmpath_workers": "The sidecar's workers. A dead one is ejected at its first refused connection.",
    "- name: warmpath_keeper": "The keepers: endpoint discovery.",
}
"""First words of a line, and what is said above the first line that begins so."""


def annotate(text: str, notes: Mapping[str, str] = NOTES) -> str:
    """Put each note above the first line that begins with its key, indented alike."""
    waiting = dict(notes)
    lines: list[str] = []
    for line in text.splitlines():
        stripped = line.lstrip()
        key = next((key for key in waiting if stripped.startswith(key)), None)
        if key is not None:
            indent = " " * (len(line) - len(stripped))
            lines.append(f"{indent}# {waiting.pop(key)}")
        lines.append(line)
    return "\n".join(lines) + "\n"
