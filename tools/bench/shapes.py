"""Models and checkpoints of random weights in published sizes, for every benchmark."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BitsAndBytesConfig, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from moe_qlora.models import named
from moe_qlora.testing import model_class, tiny_config

Encode = Callable[[str, tuple[int, ...], Any], dict[str, torch.Tensor]]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def whole_config(model: str, *, layers: int | None = None, tiny: bool = False) -> Any:
    """The configuration of a model as `moe-qlora plan` takes it, in bf16, without quantization.

    `layers` are hidden layers to keep; `tiny` is the registry's tiny one of this model type.
    """
    source = named.resolve(model)
    if tiny:
        source = named.resolve(tiny_config(source.config.model_type))
    config = deepcopy(source.config)
    config.__dict__.pop("quantization_config", None)
    config.dtype = torch.bfloat16
    text: Any = config.get_text_config()
    had = text.num_hidden_layers
    text.num_hidden_layers = min(layers or had, had)
    for name, value in vars(text).items():  # lists have an entry for each layer
        if isinstance(value, list) and len(value) == had:
            setattr(text, name, value[: text.num_hidden_layers])
    return config


def quantization(**more: Any) -> Any:
    """nf4 with double quantization, computed in bf16."""
    settings = {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    settings |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return BitsAndBytesConfig(**settings | more)


def meta_model(config: Any) -> Any:
    """Return the model on meta, in bf16."""
    with torch.device("meta"):
        return model_class(config.model_type)._from_config(config, dtype=torch.bfloat16)


def write_checkpoint(folder: Path, config: Any, device: Any, encode: Encode) -> None:
    """Write a checkpoint of random weights, a file for each layer."""
    model = meta_model(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        group = name.split(".")[2] if ".layers." in name else "rest"
        groups.setdefault(group, {})[name] = tensor
    places: dict[str, str] = {}
    for index, names in enumerate(groups.values()):
        tensors: dict[str, torch.Tensor] = {}
        for key, value in revert_weight_conversion(model, names).items():
            tensors |= encode(key, tuple(value.shape), device)
        file = f"model-{index:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    index_file = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index_file)


def encode_bf16(key: str, shape: tuple[int, ...], device: Any) -> dict[str, torch.Tensor]:
    """Make bf16 matrices of a standard deviation of 0.02, and norms of ones."""
    if len(shape) == 1:
        return {key: torch.ones(shape, dtype=torch.bfloat16)}
    return {key: torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.02).cpu()}


def write_tokenizer(folder: Path) -> Any:
    """Save and return a tokenizer of bytes, with a chat template that marks replies."""
    vocabulary = ["<|end|>", "<|pad|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "chat_template": CHAT_TEMPLATE}
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)
    saved.save_pretrained(folder)
    return saved
