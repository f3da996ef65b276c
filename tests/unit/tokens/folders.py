"""Small tokenizers of every build that matters to cutting, and chat templates of every kind, made on the spot."""

import itertools
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from pydoc_data import topics
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_START, _END, _BEGIN = "<|im_start|>", "<|im_end|>", "<|begin|>"
_VOCABULARY = 600
_SPLIT = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n\\nToday Date: " + date_string + "\\n\\n" + system_message + "<|im_end|>" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) + "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|im_end|>" }}
    {%- else %}
        {{- "<|im_start|>ipython\\n\\n" + message.content + "<|im_end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""

TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if reasoning %}{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
    {%- generation %}{{- message.content }}{%- endgeneration %}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + (tool_call | tojson) + '\\n' + (tool_call.function.arguments | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- for document in documents or [] %}{{- '<|im_start|>' + (document | tojson) }}{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
    {%- if reasoning_effort %}{{- 'effort ' + reasoning_effort }}{%- endif %}
{%- endif %}
"""

PARTS = """{%- macro shown(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for item in content %}
            {%- if 'text' in item %}{{- item.text }}{{- item.cache_control | tojson if item.cache_control }}
            {%- elif item.type == 'tool_reference' %}{{- '@' + item.name }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + shown(message.content) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

DEVELOPER = (
    "{% for message in messages %}<|im_start|>{{ 'dev' if message.role == 'developer' else message.role }}\n"
    "{% if message.tools %}{{ message.tools | tojson }}{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
)

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "tools": TOOLS, "parts": PARTS, "developer": DEVELOPER}


@cache
def byte_level() -> Tokenizer:
    """A byte-level BPE as Qwen and SmolLM have it; treat it as fixed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer)


@cache
def with_beginning() -> Tokenizer:
    """A byte-level BPE with a split of its own and a token at the beginning of a text, as Llama 3 has it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    _trained(tokenizer)
    begin = processors.TemplateProcessing(
        single=f"{_BEGIN} $A", pair=None, special_tokens=[(_BEGIN, tokenizer.token_to_id(_BEGIN))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return tokenizer


@cache
def spaced_at_first() -> Tokenizer:
    """A BPE that adds a space to the beginning of a text only, as Mistral has it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _trained(tokenizer)


@cache
def spaced_everywhere() -> Tokenizer:
    """A BPE that adds a space to each text between special tokens, and replaces others, as Llama 2 has it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _trained(tokenizer)


@cache
def with_greedy_tokens() -> Tokenizer:
    """Added tokens that take white space in, that are the beginning of others, and that are normalized."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens(
        [
            AddedToken("<mask>", lstrip=True, special=True, normalized=False),
            AddedToken("<tail>", rstrip=True, special=True, normalized=False),
            AddedToken("<|im_start|>x", special=True, normalized=False),
            AddedToken("<|im_start|><|im_end", special=True, normalized=False),
            AddedToken("plain", special=False, normalized=True),
            AddedToken("</think>", special=False, normalized=False),
        ]
    )
    return tokenizer


@cache
def with_single_words() -> Tokenizer:
    """An added token that counts only between characters that are no letters."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_tokens([AddedToken("tool", single_word=True, normalized=False)])
    return tokenizer


@cache
def with_both_ends() -> Tokenizer:
    """Tokens at the beginning and at the end of a text."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BEGIN} $A {_END}",
        pair=None,
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (_BEGIN, _END)],
    )
    return tokenizer


@cache
def with_a_letter_in_front() -> Tokenizer:
    """What stands in front of a text looks like text."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    letter = tokenizer.token_to_id("a")
    tokenizer.post_processor = processors.TemplateProcessing(single="a $A", pair=None, special_tokens=[("a", letter)])
    return tokenizer


TOKENIZERS = {
    "byte_level": byte_level,
    "with_beginning": with_beginning,
    "spaced_at_first": spaced_at_first,
    "spaced_everywhere": spaced_everywhere,
    "with_greedy_tokens": with_greedy_tokens,
    "with_single_words": with_single_words,
    "with_both_ends": with_both_ends,
    "with_a_letter_in_front": with_a_letter_in_front,
}


def write(
    folder: Path, tokenizer: Tokenizer, template: str = CHATML, settings: Mapping[str, Any] | None = None
) -> Path:
    """Write a tokenizer's folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    named = {"bos_token": _BEGIN, "eos_token": _END, "tokenizer_class": "PreTrainedTokenizerFast", **(settings or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder


def _trained(tokenizer: Tokenizer) -> Tokenizer:
    """Train on the language reference that every Python carries: real English, always at hand."""
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<unk>", _START, _END, _BEGIN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = itertools.chain.from_iterable(text.splitlines() for text in topics.topics.values())
    tokenizer.train_from_iterator(itertools.islice(lines, 3000), trainer)
    return tokenizer
