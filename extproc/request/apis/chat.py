"""Chat completions: `/v1/chat/completions`, and vLLM's batch of conversations."""

from typing import Any

from extproc.request.apis.body import Templated, templated_lead
from extproc.request.media import Room
from extproc.request.prompt import Prompt, conversation, prompts
from extproc.request.volatile import Rules


class Chat(Templated, gc=False):
    """Body of a chat completion; embeddings and scores of a conversation share it."""

    messages: Any = None
    prompt_token_ids: Any = None  # TensorRT-LLM: the conversation already templated and tokenized
    tools: Any = None
    documents: Any = None
    reasoning_effort: Any = None


def chat_prompt(body: Chat, rules: Rules) -> Prompt:
    """Return the prompt of a chat completion; one without segments when the body has no messages.

    `tool_choice` and `response_format` are left out: with the templates of Hugging Face they only guide sampling.

    Raises:
        PromptError: the messages are malformed.
    """
    if body.prompt_token_ids is not None:
        return Prompt(prompts(body.prompt_token_ids))
    return _conversation(body, body.messages, rules)


def batch_prompt(body: Chat, rules: Rules) -> Prompt:
    """Return the prompts of `/v1/chat/completions/batch`, whose `messages` is a list of conversations.

    Raises:
        PromptError: a conversation is malformed.
    """
    if not isinstance(body.messages, list):
        return _conversation(body, body.messages, rules)
    room = Room()
    each = (_conversation(body, messages, rules, room) for messages in body.messages)
    return Prompt(tuple(segment for prompt in each for segment in prompt.segments))


def _conversation(body: Chat, messages: object, rules: Rules, room: Room | None = None) -> Prompt:
    if messages is None or messages == []:
        return Prompt()
    lead = templated_lead(body, effort=body.reasoning_effort, documents=body.documents, tools=body.tools)
    return conversation(lead, messages, rules, room)
