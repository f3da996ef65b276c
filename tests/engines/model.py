"""Makes a tiny Llama with a tokenizer of its own, so that a real vLLM serves without any download.

    .venv-vllm/bin/python tests/engines/model.py DIRECTORY

Runs in the engines' environment and imports nothing of Warmpath. The weights are random, so what it writes makes no
sense; prefill, decode and the prefix cache do the same work as with a trained model. It writes whole words, which the
tokenizer reads back as the tokens that were generated, as it does with the text of a trained model: so the next turn
finds an answer in the cache. The same interpreter and versions give the same files, so two engines loading one
directory, or two made apart, agree on every token. Beside it lie LoRA adapters of random weights.
"""

import argparse
import itertools
import json
from pathlib import Path
from pydoc_data import topics

import torch  # type: ignore[import-not-found]
from safetensors.torch import save_file  # type: ignore[import-not-found]
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import (  # type: ignore[import-not-found]
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

# 6.8 million parameters in float32: a 2,048-token prompt takes one core 0.7 s uncached and 0.04 s cached, so a hit
# and a miss lie 20 times apart while a test stays short.
HIDDEN = 512
INTERMEDIATE = 1024
LAYERS = 2
HEADS = 8
VOCABULARY = 1536
MAX_TOKENS = 8192

ADAPTERS = ("lora-a", "lora-b")
RANK = 8
TARGETS = ("q_proj", "v_proj")

# Makes the logits of words differ by several times the temperature of 1; those of all other tokens are 0.
WORD_LOGIT_SCALE = 50.0

PAD, START, END = "<|pad|>", "<|start|>", "<|end|>"

# Prints all that a conversation can have, so that token ids show whether each part of it was taken up. A line break
# that follows a statement is not printed, so none does where an answer begins: its prompt ends with one.
CHAT_TEMPLATE = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% if reasoning_effort is defined %}<|start|>effort\n{{ reasoning_effort }}<|end|>\n{% endif %}"
    "{% if enable_thinking is defined %}<|start|>thinking\n{{ enable_thinking }}<|end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|start|>{{ message['role'] }}{{ ' ' + message['tool_call_id'] if message['tool_call_id'] else '' }}\n"
    "{{ message['content'] }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the language reference that every Python carries: real English, always at hand."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = itertools.chain.from_iterable(topic.splitlines() for topic in topics.topics.values())
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=MAX_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 6.8 million random float32 weights over this tokenizer's vocabulary, which writes words only."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            vocab_size=len(tokenizer),
            max_position_embeddings=MAX_TOKENS,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    words = torch.tensor([is_word(token) for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))])
    with torch.no_grad():
        model.lm_head.weight *= WORD_LOGIT_SCALE * words.unsqueeze(1)
    return model


def make_adapters(directory: Path, layers: str = "model.layers") -> None:
    """Write all LoRA adapters below a directory; `layers` is where the model has the layers of its text model."""
    for seed, name in enumerate(ADAPTERS):
        make_adapter(directory / name, seed, layers)


def make_adapter(directory: Path, seed: int, layers: str) -> None:
    """Write a LoRA adapter as PEFT saves one: `adapter_config.json` and `adapter_model.safetensors`."""
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": TARGETS, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer, target in itertools.product(range(LAYERS), TARGETS):
        name = f"base_model.model.{layers}.{layer}.self_attn.{target}"
        weights[f"{name}.lora_A.weight"] = 0.02 * torch.randn(RANK, HIDDEN, generator=random)
        weights[f"{name}.lora_B.weight"] = 0.02 * torch.randn(HIDDEN, RANK, generator=random)
    save_file(weights, directory / "adapter_model.safetensors")


def is_word(token: str) -> bool:
    """Whether a token is a space and letters: the tokenizer splits text in front of spaces, so such tokens never merge.

    Byte-level tokens spell a space as U+0120.
    """
    return token.startswith("\u0120") and token[1:].isascii() and token[1:].isalpha()


def main() -> None:
    """Write config.json, the tokenizer, the weights (safetensors, 27 MB) and `adapters/` into the directory given."""
    parser = argparse.ArgumentParser(description="Make a tiny random Llama for tests.")
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    make_model(tokenizer).save_pretrained(directory)
    make_adapters(directory / "adapters")


if __name__ == "__main__":
    main()
