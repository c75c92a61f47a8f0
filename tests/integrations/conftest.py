"""A tiny chat model on disk, and what every run of a trainer on this CPU needs."""

import pytest
import torch


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Qwen3-MoE, float32: 2 layers of 4 experts (64 x 64), with a tokenizer of single bytes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from tools.bench.shapes import write_tokenizer

    folder = tmp_path_factory.mktemp("host") / "model"
    vocabulary = write_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    config = Qwen3MoeConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128,
        moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        initializer_range=0.1, eos_token_id=0, pad_token_id=1, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trainable_linears():
    """Linear4bit layers that can be trained on the CPU after an evaluation.

    bitsandbytes 0.50 turns the weights of its Linear layers, in evaluation on CPUs with
    AVX512-BF16, into a form that gradients do not pass.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
        yield


@pytest.fixture
def left_off():
    """Packing while models are loaded is off after the test."""
    from tests.helpers.training import is_enabled

    yield
    assert not is_enabled()


@pytest.fixture
def quiet_loading():
    """No progress bars of transformers, whose state is put back."""
    import transformers

    was = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    yield
    if was:
        transformers.logging.enable_progress_bar()
