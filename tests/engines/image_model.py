"""Makes a tiny vision-language model of random weights, so that a real vLLM takes images without any download.

    .venv-vllm/bin/python tests/engines/image_model.py DIRECTORY

An Idefics3: the text model and tokenizer of `model.py` behind a vision tower of one layer. An image is cut into tiles
of 84 pixels and stands in the prompt as some 40 tokens where it is twice as wide as high, and some 60 where it is
square: more than a block of 32, so every image lies in two blocks at least. The tokens of images of one shape are the
same: only what the engine adds to the hashes of their blocks tells them apart.

The models of LLaVA's and Qwen's kind cannot be had here: vLLM loads them with torchvision, which its CPU build goes
without.
"""

import argparse
from pathlib import Path

import torch  # type: ignore[import-not-found]
from model import (  # type: ignore[import-not-found]
    CHAT_TEMPLATE,
    make_adapters,
    make_model,
    make_tokenizer,
)
from transformers import (  # type: ignore[import-not-found]
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

PATCH = 14
TILE = 6 * PATCH
SCALE = 2
TILES = 2

# Tokens by the names that the processor knows them by.
IMAGE, AROUND, OVERVIEW = "<image>", "<fake_token_around_image>", "<global-img>"

# Prints the parts of a message one after another.
PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
)


def make_template() -> str:
    """The text model's template, which takes parts.

    Raises:
        ValueError: the text model's template prints contents in another way than it did.
    """
    whole = "{{ message['content'] }}"
    if CHAT_TEMPLATE.count(whole) != 1:
        raise ValueError(f"the text model's template lacks {whole}: bring `PARTS` in line with it")
    return str(CHAT_TEMPLATE).replace(whole, PARTS)


def make_processor(tokenizer: PreTrainedTokenizerFast) -> Idefics3Processor:
    """What turns images into tiles, and each place of an image into as many tokens as its tiles take."""
    return Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": TILES * TILE}, max_image_size={"longest_edge": TILE}
        ),
        tokenizer=tokenizer,
        image_seq_len=(TILE // PATCH // SCALE) ** 2,
        chat_template=make_template(),
    )


def make_vision_model(tokenizer: PreTrainedTokenizerFast) -> Idefics3ForConditionalGeneration:
    """The text model behind a vision tower of one layer."""
    text = make_model(tokenizer)
    torch.manual_seed(1)
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=text.config.to_dict(),
            vision_config={
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": TILE,
                "patch_size": PATCH,
            },
            scale_factor=SCALE,
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.model.text_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


def main() -> None:
    """Write the configuration, the tokenizer, the processor, the weights and `adapters/` into the directory given."""
    parser = argparse.ArgumentParser(description="Make a tiny random vision-language model for tests.")
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    tokenizer = make_tokenizer()
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, TILES + 1) for column in range(1, TILES + 1)]
    tokenizer.add_special_tokens({"additional_special_tokens": [AROUND, IMAGE, "<end_of_utterance>", OVERVIEW, *tiles]})
    tokenizer.chat_template = make_template()
    make_processor(tokenizer).save_pretrained(directory)
    make_vision_model(tokenizer).save_pretrained(directory)
    make_adapters(directory / "adapters", "model.text_model.layers")


if __name__ == "__main__":
    main()
