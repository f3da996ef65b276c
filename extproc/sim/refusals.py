"""The errors vLLM answers with: status, type, parameter and text."""

import msgspec


class Refusal(Exception):  # noqa: N818 - what the simulated engine says, not a fault of this program
    """A request that the simulated engine turns down.

    Attributes:
        status: HTTP status.
        kind: `error.type`.
        param: `error.param`.
        code: `error.code`; the status unless told otherwise.
    """

    def __init__(
        self, status: int, kind: str, message: str, param: str | None = None, *, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code or status

    def body(self) -> bytes:
        """Return vLLM's JSON body."""
        return msgspec.json.encode({"error": self.fields()})

    def fields(self) -> dict[str, str | int | None]:
        """Return the members of `error`."""
        return {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}


def invalid(message: str) -> Refusal:
    """Return the 400 for a body that is no JSON or not of the expected shape."""
    return Refusal(400, "Bad Request", message)


def bad_value(message: str, param: str | None = None, value: int | None = None) -> Refusal:
    """Return the 400 for a well-formed request that the engine cannot serve."""
    place = "" if param is None else f" (parameter={param}, value={value})"
    return Refusal(400, "BadRequestError", message + place, param)


def unknown_model(name: str, aliases: tuple[str, ...]) -> Refusal:
    """Return the 404 for a model that is not served; older versions name no `aliases`."""
    text = f"The model `{name}` does not exist."
    if aliases:
        text += f" Valid aliases: {', '.join(aliases)}."
    return Refusal(404, "NotFoundError", text, "model")


def prompt_too_long(tokens: int, limit: int) -> Refusal:
    """Return the 400 for a prompt that leaves no room for an answer."""
    text = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {tokens} input "
        "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
        "prompt."
    )
    return bad_value(text, "input_tokens", tokens)


def answer_too_long(asked: int, prompt_tokens: int, limit: int) -> Refusal:
    """Return the 400 for a `max_tokens` that the context cannot hold."""
    text = (
        f"'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum context length is "
        f"{limit} tokens and your request has {prompt_tokens} input tokens ({asked} > {limit} - {prompt_tokens})."
    )
    return bad_value(text, "max_tokens", asked)


def busy() -> Refusal:
    """Return the 503 of a full queue (`--max-num-queued-reqs`)."""
    text = (
        "The engine is currently busy and cannot accept new requests. Please try again later or on a different "
        "instance."
    )
    return Refusal(503, "Service Unavailable", text)


def engine_failed(status: int = 500) -> Refusal:
    """Return what a request gets whose engine fails while it is served."""
    text = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return Refusal(status, "InternalServerError", text)
