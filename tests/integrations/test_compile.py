"""transformers.Trainer with torch_compile=True, on the whole model and by accelerate's regions."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.training import (
    adapted,
    assert_same_training,
    four_steps,
    loaded,
    logged_losses,
    trainer_of,
)

pytestmark = [
    pytest.mark.usefixtures("trainable_linears", "quiet_loading"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def trained(model_folder, out, **options):
    """The losses of four steps of two micro-batches, and the adapter as it was saved."""
    options |= {"save_strategy": "no", "gradient_accumulation_steps": 2, "use_cpu": True}
    trainer = trainer_of(adapted(loaded(model_folder)), four_steps(out, 2, **options))
    trainer.train()
    trainer.save_model(str(out))
    return logged_losses(trainer), load_file(out / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def plain(model_folder, tmp_path_factory):
    return trained(model_folder, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
def test_training_is_the_same_and_compiles_at_the_first_step_alone(
    regional, plain, model_folder, tmp_path, monkeypatch
):
    torch.compiler.reset()
    # TrainingArguments writes the first of these.
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", str(regional))
    counters = torch._dynamo.utils.counters
    counters.clear()
    # By regions, modules of all kinds share torch's own wrapper, which is compiled for each kind.
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    with torch._dynamo.config.patch(error_on_recompile=not regional):
        compiled = trained(model_folder, tmp_path, **options)
    assert counters["stats"]["unique_graphs"] == (6 if regional else 1)
    assert not counters["graph_break"]
    assert_same_training(compiled, plain, 1e-4)
    torch.compiler.reset()
