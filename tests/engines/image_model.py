"""Makes a tiny vision-language model of random weights, so that a real vLLM takes images without any download.

    .venv-vllm/bin/python tests/engines/image_model.py DIRECTORY

A LLaVA: the text model and tokenizer of `model.py`, a vision tower of one layer, and a chat template that prints
`<|image|>` where an image stands. Each image is 36 tokens, all alike: more than a block of 32, so every image lies in
two blocks at least, and only what the engine adds to a block's hash tells one image from another.
"""

import argparse
from pathlib import Path

import torch  # type: ignore[import-not-found]
from model import (  # type: ignore[import-not-found]
    CHAT_TEMPLATE,
    MAX_TOKENS,
    make_model,
    make_tokenizer,
)
from transformers import (  # type: ignore[import-not-found]
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

IMAGE = "<|image|>"
PATCH = 14
SIDE = 6 * PATCH

# Prints the parts of a message one after another.
PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
)


def make_template() -> str:
    """The text model's template, which takes parts."""
    whole = "{{ message['content'] }}"
    if CHAT_TEMPLATE.count(whole) != 1:
        raise ValueError("the text model's template prints contents in another way now: bring this one in line")
    return CHAT_TEMPLATE.replace(whole, PARTS)


def make_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """What turns images into pixels, and each place of an image into as many tokens as it takes."""
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=make_template(),
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )


def make_vision_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """The text model behind a vision tower of one layer."""
    text = make_model(tokenizer)
    torch.manual_seed(1)
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        projection_dim=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=text.config,
            vision_config=vision,
            image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
        )
    )
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


def main() -> None:
    """Write the configuration, the tokenizer, the processor, the weights and `adapters/` into the directory given."""
    parser = argparse.ArgumentParser(description="Make a tiny random vision-language model for tests.")
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.chat_template = make_template()
    tokenizer.model_max_length = MAX_TOKENS
    make_processor(tokenizer).save_pretrained(directory)
    make_vision_model(tokenizer).save_pretrained(directory)


if __name__ == "__main__":
    main()
