"""Seven ways to prepare a Mixture-of-Experts model for training, as a table of what each does.

    python tools/scenarios.py                    on a small model, made on the spot: CPU, a minute
    python tools/scenarios.py --model FOLDER     on a 16-bit checkpoint of yours

Each scenario loads the model anew and trains a few steps with `transformers.Trainer`; a row says
what is found then: layers that checkpoint, the dtype of all weights but LoRA's (of packed ones that
they compute in or decode to), trained weights of all, expert parameters, bytes, each once. FFT +
FP16 and Q-LoRA load the model in float16: `TrainingArguments(fp16=True)` is mixed precision over
float32. Adam's epsilon is 1e-4, since its default is zero in float16.

Exit codes: 0 for success, 1 where a scenario fails, with a line on stderr in the place of its row,
2 for bad input with one line on stderr, 3 for a model without experts.
"""

import argparse
import gc
import logging
import math
import sys
import tempfile
import warnings
from collections import Counter
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

import moe_qlora
from moe_qlora.errors import CheckpointError, MoeQloraError
from moe_qlora.models import named
from moe_qlora.packing.decoders import from_quant_state
from moe_qlora.planning.model import lora_config_of

RANK = 4
HEADINGS = ("Scenario", "Observed", "Trainable", "Experts", "Bytes")
SCENARIOS = {
    "FFT": "",
    "FFT + FP16": "half",
    "FFT + GC": "checkpointing",
    "LoRA": "lora",
    "LoRA + GC": "lora checkpointing",
    "Q-LoRA": "half lora packed",
    "Q-LoRA + GC": "half lora packed checkpointing",
}


def main() -> int:
    """Run the scenarios and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools/scenarios.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="FOLDER", help="a model of yours, instead of a new one")
    parser.add_argument("--steps", type=int, default=4, help="steps of each training (4)")
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    options, rows, code = parser.parse_args(), [HEADINGS, ("---",) * len(HEADINGS)], 0
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = options.model or small_model(scratch)
            if options.model and not moe_qlora.detect(named.build(named.resolve(folder))):
                sys.stderr.write(f"error: --model {folder} holds no expert parameters.\n")
                return 3
            for name in SCENARIOS:
                try:
                    rows.append(_row(name, folder, options))
                except MoeQloraError:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever a library has against it
                    code = 1
                    said = " ".join(f"{type(error).__name__}: {error}".split())
                    sys.stderr.write(f"error: {name}: {said}\n")
        except MoeQloraError as error:
            sys.stderr.write("error: " + " ".join(str(error).split()) + "\n")
            return 2
    sys.stdout.write("".join("| " + " | ".join(cells) + " |\n" for cells in rows))
    return code


def small_model(folder: str) -> str:
    """Write a bfloat16 Qwen3-MoE checkpoint of 3.6 million random weights to `folder`."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=16, num_experts_per_tok=4, tie_word_embeddings=True,
        max_position_embeddings=4096,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def _row(name: str, folder: str, options: argparse.Namespace) -> tuple[str, ...]:
    """Train on one batch of random tokens, again and again, and look at the model then."""
    how, half = SCENARIOS[name], torch.float16
    gc.collect()  # the model of the row before
    device = "cuda:0" if torch.cuda.is_available() and not options.cpu else "cpu"
    settings: dict[str, Any] = {"dtype": half if "half" in how else "auto"}
    if "packed" in how:
        nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": half}
        config = transformers.BitsAndBytesConfig(bnb_4bit_use_double_quant=True, **nf4)
        settings["quantization_config"] = config
    load = transformers.AutoModelForCausalLM.from_pretrained
    try:
        with moe_qlora.enabled():
            model: Any = load(folder, device_map={"": device}, **settings)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{folder} cannot be loaded: {reason}") from error
    experts = moe_qlora.detect(model).experts
    owners = [(model.get_submodule(one.module_name), one.parameter_name) for one in experts]
    if "lora" in how:
        lora_config = lora_config_of(model, (), "attention", RANK)
        lora_config.target_parameters = [param.name for param in experts]
        unpacked_ok = "packed" not in how  # 16-bit experts under LoRA are a way of their own
        model = moe_qlora.get_peft_model(model, lora_config, unpacked_ok=unpacked_ok)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (2, 64), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = transformers.TrainingArguments(
            output_dir=scratch, max_steps=options.steps, per_device_train_batch_size=2,
            gradient_checkpointing="checkpointing" in how, adam_epsilon=1e-4, logging_steps=1,
            learning_rate=1e-3 if "lora" in how else 1e-4, save_strategy="no", report_to=[],
            disable_tqdm=True, seed=0, use_cpu=device == "cpu",
        )  # fmt: skip
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # as Trainer does for spread models: no copy on every other GPU
        data: Any = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry in steps:
        if not (math.isfinite(entry["loss"]) and 0 < float(entry["grad_norm"]) < math.inf):
            raise RuntimeError(f"{name} does not train: {entry}")
    losses = f"loss {steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f} in {len(steps)} steps"
    sys.stderr.write(f"{name}: {losses}\n")
    return (name, *observe(model, owners))


def observe(model: nn.Module, owners: list[tuple[Any, str]]) -> tuple[str, ...]:
    """Look at a model that was trained: the cells of its row."""
    from bitsandbytes.nn import Linear4bit, Params4bit  # its logs are silenced by now

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    linears = [m for m in model.modules() if isinstance(m, Linear4bit)]
    computed = {id(m.weight): m.compute_dtype for m in linears}
    adapters = {id(one) for name, one in model.named_parameters() if ".lora_" in name}
    dtypes: Counter[torch.dtype] = Counter()
    quant, trainable, total = "no", 0, 0
    tensors = [*model.buffers(), *model.parameters()]
    for weight in model.parameters():
        count, dtype = weight.numel(), weight.dtype
        if isinstance(weight, Params4bit):
            quant, count = "4bit", weight.quant_state.shape.numel()
            dtype = computed.get(id(weight), weight.quant_state.dtype)
            tensors += from_quant_state(weight, weight.quant_state).statistics
        total += count
        trainable += count * weight.requires_grad
        if id(weight) not in adapters:
            dtypes[dtype] += count
    held = {t.data_ptr(): t.nbytes for t in tensors}  # views of buffers after these
    on = sum(layer.gradient_checkpointing for layer in layers)
    gc_is = "off" if on == 0 else "on" if on == len(layers) else f"{on} of {len(layers)}"
    names = "+".join(str(dtype) for dtype, _ in dtypes.most_common())
    flags = f"gc:{gc_is}, lora:{'yes' if adapters else 'no'}, quant:{quant}, dtype:{names}"
    stored: Counter[str] = Counter()
    for module, name in owners:
        if (plain := module._parameters.get(name)) is not None:
            stored[f"{8 * plain.itemsize}-bit"] += 1
        else:
            packed = module.parametrizations[name].original.quant_state
            stored[f"packed {packed.quant_type}"] += 1
    experts = ", ".join(f"{how}: {count}" for how, count in stored.items())
    return flags, f"{short(trainable)} / {short(total)}", experts, f"{sum(held.values()):,}"


def short(count: int) -> str:
    """A count as the table gives it: 377.0M, 178.2K."""
    units = ((10**9, "B"), (10**6, "M"), (10**3, "K"))
    size, unit = next(pair for pair in units if count >= pair[0])
    return f"{count / size:.1f}{unit}"


if __name__ == "__main__":
    sys.exit(main())
