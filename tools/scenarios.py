"""Seven ways to prepare a Mixture-of-Experts model for training, and what each one really does.

    python tools/scenarios.py                    on a small model, made on the spot: CPU, a minute
    python tools/scenarios.py --model FOLDER     on a 16-bit checkpoint of yours

Each scenario loads the model anew, prepares it and trains a few steps with `transformers.Trainer`;
then a row of a Markdown table says what was found in the model while it trained:

    FFT, FFT + FP16, FFT + GC     full fine-tuning; in float16; with gradient checkpointing
    LoRA, LoRA + GC               LoRA on attention and on every expert, nothing packed
    Q-LoRA, Q-LoRA + GC           the same, with Linear layers and experts packed to nf4

What a cell says is read off modules, parameters and storages, never off the arguments:

    gc         the flag of each layer that can be checkpointed; "2 of 4" where they differ
    lora       whether the model holds LoRA layers
    quant      the types of the parameters: bitsandbytes' 4-bit ones, its 8-bit ones, or none
    dtype      of all weights but LoRA's; a packed Linear layer counts with the dtype that it
               computes in, packed experts with the dtype that they are decoded to
    Trainable  weights that are trained / all, LoRA's included; a packed weight is one weight
    Experts    expert parameters (each with all experts of a layer) and how they are stored
    Bytes      storages of parameters, buffers and quantization statistics, each once

FFT and LoRA keep the dtype of the checkpoint. FFT + FP16 and Q-LoRA load the model in float16,
rather than by `TrainingArguments(fp16=True)`: that is mixed precision over float32 weights, and
accelerate refuses it without a GPU. Adam's epsilon is 1e-4 throughout, since its default of 1e-8 is
zero in float16. Nothing is evaluated, and so bitsandbytes keeps a form of its Linear layers that
can be trained on the CPU.

Exit codes: 0 for success, 1 where a scenario fails, with a line on stderr in the place of its row,
2 for bad input with one line on stderr, 3 for a model without experts.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import moe_qlora
from moe_qlora.checkpoint.integrity import open_checkpoint
from moe_qlora.errors import CheckpointError, MoeQloraError

SEED = 0
FAILED, BAD_INPUT, NO_EXPERTS = 1, 2, 3
RANK = 4
HEADINGS = ("Scenario", "Observed", "Trainable", "Experts", "Bytes")


@dataclass(frozen=True)
class Scenario:
    """One way to prepare a model.

    Attributes:
        name: As the table gives it.
        half: Load in float16, else in the dtype of the checkpoint.
        checkpointing: The trainer's gradient checkpointing.
        lora: Train LoRA, else all weights.
        packed: Pack Linear layers and experts to nf4 while loading.
    """

    name: str
    half: bool = False
    checkpointing: bool = False
    lora: bool = False
    packed: bool = False


SCENARIOS = (
    Scenario("FFT"),
    Scenario("FFT + FP16", half=True),
    Scenario("FFT + GC", checkpointing=True),
    Scenario("LoRA", lora=True),
    Scenario("LoRA + GC", lora=True, checkpointing=True),
    Scenario("Q-LoRA", half=True, lora=True, packed=True),
    Scenario("Q-LoRA + GC", half=True, lora=True, packed=True, checkpointing=True),
)


@dataclass(frozen=True)
class Observation:
    """What was found in a model.

    Attributes:
        checkpointed: Layers whose gradient checkpointing is on, and all that have the flag.
        lora: Whether there are LoRA layers.
        quants: "4bit", "8bit": the kinds of packed parameters there are.
        dtypes: Of all weights but LoRA's, the most frequent first.
        trainable: Weights that require gradients.
        total: All weights.
        experts: Expert parameters by how they are stored, such as {"packed nf4": 8}.
        nbytes: Of all storages.
    """

    checkpointed: tuple[int, int]
    lora: bool
    quants: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    trainable: int
    total: int
    experts: dict[str, int]
    nbytes: int

    def cells(self) -> tuple[str, str, str, str]:
        """Observed, trainable, experts and bytes, as the table gives them."""
        on, layers = self.checkpointed
        state = "off" if on == 0 else "on" if on == layers else f"{on} of {layers}"
        observed = (
            f"gc:{state}, lora:{'yes' if self.lora else 'no'}, "
            f"quant:{'+'.join(self.quants) or 'no'}, dtype:{'+'.join(map(str, self.dtypes))}"
        )
        stored = ", ".join(f"{how}: {count}" for how, count in self.experts.items())
        return (
            observed,
            f"{short(self.trainable)} / {short(self.total)}",
            stored,
            f"{self.nbytes:,}",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios and print the table; returns the exit code."""
    options = _options(arguments)
    _silence()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.model
            if folder is None:
                folder = small_model(Path(scratch) / "model")
            elif not _has_experts(folder):
                sys.stderr.write(f"error: --model {folder} holds no expert parameters.\n")
                return NO_EXPERTS
            rows, code = [], 0
            for scenario in options.scenario:
                try:
                    rows.append(_row(scenario, folder, options))
                except MoeQloraError:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever a library has against it
                    code = FAILED
                    said = " ".join(f"{type(error).__name__}: {error}".split())
                    sys.stderr.write(f"error: {scenario.name}: {said}\n")
    except MoeQloraError as error:
        sys.stderr.write("error: " + " ".join(str(error).split()) + "\n")
        return BAD_INPUT
    sys.stdout.write(markdown(rows))
    return code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/scenarios.py",
        description="Prepare a Mixture-of-Experts model in seven ways, train each a few steps, and "
        "print what was found in it.",
    )
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    parser.add_argument("--model", metavar="FOLDER", help="a model of yours, instead of a new one")
    parser.add_argument(
        "--scenario",
        metavar="NAME",
        action="append",
        help=f"only this one; may be given again: {', '.join(by_name)}",
    )
    parser.add_argument("--steps", type=int, default=4, help="steps of each training (4)")
    parser.add_argument("--batch", type=int, default=2, help="rows of tokens in a step (2)")
    parser.add_argument("--length", type=int, default=64, help="tokens in a row (64)")
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    options = parser.parse_args(arguments)
    for name in ("steps", "batch", "length"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    unknown = [name for name in options.scenario or () if name not in by_name]
    if unknown:
        parser.error(f"there is no scenario {unknown[0]!r}; choose from {', '.join(by_name)}")
    options.scenario = [by_name[name] for name in options.scenario or by_name]
    return options


def _silence() -> None:
    """Leave out what libraries say about optional parts, and transformers' loading bars.

    Called before bitsandbytes is imported, which tells what it lacks at once.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


# The model.


def small_model(folder: Path) -> Path:
    """Write a bfloat16 Qwen3-MoE checkpoint of 3.6 million random weights to `folder`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def _has_experts(folder: str) -> bool:
    """Whether a checkpoint holds experts, by its configuration alone.

    Raises:
        CheckpointError: It is missing, damaged, quantized already, or no text model.
    """
    from moe_qlora.models import named

    if not Path(folder).is_dir():
        raise CheckpointError(f"--model {folder} is no folder; name a checkpoint folder.")
    source = named.resolve(folder)
    quantized = getattr(source.config, "quantization_config", None)
    if quantized is not None:
        method = quantized.get("quant_method") or "unknown method"
        raise CheckpointError(
            f"--model {folder} is quantized already ({method}), and full fine-tuning needs plain "
            "weights; name the 16-bit checkpoint that it was made from."
        )
    if type(source.config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(
            f"--model {folder} is of type {source.config.model_type!r}, which is no causal "
            "language model in transformers; name a checkpoint of one."
        )
    if any(Path(folder).glob("*.safetensors")):
        open_checkpoint(folder).close()  # reads the headers, and names what is cut off
    return bool(moe_qlora.detect(named.build(source)))


def prepare(
    folder: str | Path, scenario: Scenario, device: str
) -> tuple[Any, list[tuple[nn.Module, str]]]:
    """Load the model, and put LoRA on it where the scenario has it.

    Returns:
        The model, and for each expert parameter the module that owns it and its name there.

    Raises:
        CheckpointError: The weights cannot be loaded.
    """
    half = torch.float16
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=half,
    )
    try:
        with moe_qlora.enabled():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=half if scenario.half else "auto",
                quantization_config=config if scenario.packed else None,
                device_map={"": device},
            )
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{folder} cannot be loaded: {reason}") from error
    experts = moe_qlora.detect(model).experts
    owners = [(model.get_submodule(one.module_name), one.parameter_name) for one in experts]
    if not scenario.lora:
        return model, owners
    from peft import LoraConfig

    lora_config = LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=_attention(model),
        target_parameters=[param.name for param in experts],
        task_type="CAUSAL_LM",
    )
    unpacked_ok = not scenario.packed  # 16-bit experts under LoRA are a way of their own
    return moe_qlora.get_peft_model(model, lora_config, unpacked_ok=unpacked_ok), owners


def _attention(model: nn.Module) -> list[str]:
    """The Linear layers of every attention module, packed ones included."""
    return [
        f"{name}.{inner}"
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention")
        for inner, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    ]


# Training.


def _row(scenario: Scenario, folder: str | Path, options: Any) -> tuple[str, ...]:
    device = "cuda:0" if torch.cuda.is_available() and not options.cpu else "cpu"
    model, owners = prepare(folder, scenario, device)
    seen, losses = train(model, owners, scenario, options.steps, options.batch, options.length)
    del model, owners
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    sys.stderr.write(
        f"{scenario.name}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps\n"
    )
    return (scenario.name, *seen.cells())


def train(
    model: Any,
    owners: Sequence[tuple[nn.Module, str]],
    scenario: Scenario,
    steps: int,
    batch: int,
    length: int,
) -> tuple[Observation, list[float]]:
    """Train on one batch of random tokens, again and again, with `transformers.Trainer`.

    Args:
        model: As `prepare` returns it; changed.
        owners: The same.
        scenario: For its gradient checkpointing.
        steps: Optimizer steps.
        batch: Rows in a step.
        length: Tokens in a row.

    Returns:
        What was found in the model after the first step, and the loss of each step.

    Raises:
        RuntimeError: A loss was not finite, or no gradient reached the weights to be trained.
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    observed: list[Observation] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if not observed:
                observed.append(observe(kwargs["model"], owners))

    generator = torch.Generator().manual_seed(SEED)
    vocabulary = base.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (batch, length), generator=generator)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=steps,
            per_device_train_batch_size=batch,
            gradient_checkpointing=scenario.checkpointing,
            learning_rate=1e-3 if scenario.lora else 1e-4,
            adam_epsilon=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=SEED,
            use_cpu=next(base.parameters()).device.type == "cpu",
        )
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # as Trainer does for spread models: no copy on every other GPU
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Watch()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return observed[0], _finite_losses(scenario, trainer.state.log_history)


def _finite_losses(scenario: Scenario, log: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the loss of each step that a trainer logged.

    Raises:
        RuntimeError: A loss was not finite, or no gradient reached the weights to be trained.
    """
    steps = [entry for entry in log if "loss" in entry]
    for entry in steps:
        norm = float(entry["grad_norm"])
        if not (math.isfinite(entry["loss"]) and math.isfinite(norm) and norm > 0):
            raise RuntimeError(f"{scenario.name} does not train: {entry}")
    return [float(entry["loss"]) for entry in steps]


# What there is to see.


def observe(model: nn.Module, owners: Sequence[tuple[nn.Module, str]]) -> Observation:
    """Look at a model that is being trained.

    Args:
        model: As the trainer has it.
        owners: The module that owns each expert parameter, and its name there.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit
    from peft.tuners.lora import LoraLayer
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[bool] = []
    adapters: set[int] = set()
    computed: dict[int, torch.dtype] = {}
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            layers.append(bool(module.gradient_checkpointing))
        if isinstance(module, Linear4bit):
            computed[id(module.weight)] = module.compute_dtype
        if isinstance(module, LoraLayer):
            for name in module.adapter_layer_names:
                adapters.update(map(id, getattr(module, name).parameters()))
    dtypes: Counter[torch.dtype] = Counter()
    quants: set[str] = set()
    trainable = total = 0
    for parameter in model.parameters():
        shape, dtype = parameter.shape, parameter.dtype
        if isinstance(parameter, Params4bit):
            quants.add("4bit")
            shape = parameter.quant_state.shape
            dtype = computed.get(id(parameter), parameter.quant_state.dtype)
        total += shape.numel()
        trainable += shape.numel() if parameter.requires_grad else 0
        if id(parameter) not in adapters:
            dtypes[dtype] += shape.numel()
    return Observation(
        checkpointed=(sum(layers), len(layers)),
        lora=bool(adapters),
        quants=tuple(sorted(quants)),
        dtypes=tuple(dtype for dtype, _ in dtypes.most_common()),
        trainable=trainable,
        total=total,
        experts=dict(Counter(_storage(module, name) for module, name in owners)),
        nbytes=_nbytes(model),
    )


def _storage(module: Any, name: str) -> str:
    """Return how a module stores an expert parameter: "16-bit" or "packed nf4"."""
    if name in module._parameters:
        return f"{8 * module._parameters[name].itemsize}-bit"
    return f"packed {module.parametrizations[name].original.quant_state.quant_type}"


def _nbytes(model: nn.Module) -> int:
    """Bytes of every storage that a parameter, a buffer or the statistics of one lie in."""
    from moe_qlora.packing.decoders import state_tensors

    tensors: list[Tensor] = [*model.buffers()]
    for parameter in model.parameters():
        tensors.append(parameter)
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            tensors += state_tensors(state)
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def short(count: int) -> str:
    """A count as the table gives it: 377.0M, 178.2K, 12."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def markdown(rows: Iterable[tuple[str, ...]]) -> str:
    """The table."""
    lines = [HEADINGS, tuple("---" for _ in HEADINGS), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


if __name__ == "__main__":
    sys.exit(main())
