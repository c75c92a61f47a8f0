"""Trains a whole Qwen3-MoE with random weights by Unsloth, as `model.py` does its peers; model.csv.

    python tools/bench/unsloth_model.py                       bf16, as its notebook for this model
    python tools/bench/unsloth_model.py --load-in-4bit
    python tools/bench/unsloth_model.py --checkpointing torch --moe-backend unsloth_triton
    python tools/bench/unsloth_model.py --tiny --device cpu   whether it runs at all

A script of its own, because Unsloth wants an older transformers than the other peers and changes
transformers, peft and trl for the whole process. It is called as its documentation says: a folder
with a published checkpoint's names, `FastLanguageModel.from_pretrained`, then `get_peft_model` with
LoRA on attention and on every expert, dropout 0. Its compiled modules, fused loss and choice of a
backend for experts are its own defaults, and so is the dtype of adapters: fp32 ones are trained
under autocast, as its trainer does. The loop is that of `model.py`, so that a step has the same in
it. The checkpoint is written first, where there is room; `--folder` keeps it for the next run.
`--load-in-4bit` packs what Unsloth packs: the setting says what became of experts and of Linear
layers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Rows, allocated, environment, release, synchronize
from loop import OPTIMIZERS, train
from shapes import name_of, whole_config
from torch import Tensor, nn

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERT_TARGETS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
CHECKPOINTING: dict[str, str | bool] = {"unsloth": "unsloth", "torch": True, "none": False}
BACKENDS = ("grouped_mm", "unsloth_triton", "native_torch")
WRITERS = 4
"""Shards written at a time."""


def main() -> None:
    """Run the benchmark that the command line asks for."""
    options = _options()
    with _folder(options) as folder:
        _environment(options, folder)
        import unsloth  # noqa: F401  # changes the libraries below, so it comes before them

        device = torch.device(options.device)
        where = environment(device, options.commit)
        config = whole_config(options.model, layers=options.layers, tiny=options.tiny)
        if config.model_type != "qwen3_moe":
            raise SystemExit(f"{options.model}: only checkpoints of qwen3_moe are written here")
        options.layers = config.num_hidden_layers
        name = f"{config.model_type}-tiny" if options.tiny else name_of(options.model)
        torch.manual_seed(0)
        write_checkpoint(config, folder, device)
        release(device)
        rows = Rows(options.out, where, name, "")
        try:
            run(options, folder, device, rows)
        except Exception as error:
            rows.start["setting"] = rows.start["setting"] or _setting(options)
            rows.fail(error)
            raise


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a name in shapes.py, or a config")
    parser.add_argument("--layers", type=int, default=None, help="default: all")
    parser.add_argument("--seq", type=int, default=None, help="default: 4096, or 64 with --tiny")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--load-in-4bit", action="store_true")
    parser.add_argument("--checkpointing", choices=list(CHECKPOINTING), default="unsloth")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lora", default="experts,attention", help="experts, attention or both")
    parser.add_argument("--moe-backend", choices=BACKENDS, help="default: Unsloth's own choice")
    parser.add_argument("--no-compile", action="store_true", help="UNSLOTH_COMPILE_DISABLE")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw_fused")
    parser.add_argument("--losses", type=int, default=0, help="record those of the first N steps")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that count")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, help="the checkpoint's; default: a temporary one")
    parser.add_argument("--out", type=Path, default=RESULTS / "model.csv")
    parser.add_argument("--commit", help="for a copy of the tree without its history")
    parser.set_defaults(data="fixed")
    options = parser.parse_args()
    options.seq = options.seq or (64 if options.tiny else 4096)
    options.lora = sorted(set(options.lora.split(",")), reverse=True)
    if not set(options.lora) <= {"attention", "experts"}:
        parser.error(f"--lora {','.join(options.lora)}: expected experts, attention or both")
    if options.warmup < 1 or options.steps < 1:
        parser.error("--warmup and --steps: expected 1 or more")
    return options


@contextmanager
def _folder(options: argparse.Namespace) -> Iterator[Path]:
    """The checkpoint's folder, removed afterwards unless it was named."""
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        yield options.folder.resolve()
        return
    places = [place for place in (Path("/dev/shm"), Path(tempfile.gettempdir())) if place.is_dir()]
    place = max(places, key=lambda place: shutil.disk_usage(place).free)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def _environment(options: argparse.Namespace, folder: Path) -> None:
    """What Unsloth reads of the environment as it is imported; nothing leaves the machine."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(folder / "compiled"))
    if options.moe_backend is not None:
        os.environ["UNSLOTH_MOE_BACKEND"] = options.moe_backend
    if options.no_compile:
        os.environ["UNSLOTH_COMPILE_DISABLE"] = "1"


def _setting(options: argparse.Namespace, model: nn.Module | None = None) -> str:
    """The words of `model.py`, with what was found in a model that has its adapters.

    Args:
        options: The command line's.
        model: With adapters; None says what was asked for.
    """
    asked = "nf4+double" if options.load_in_4bit else "bf16"
    experts, linear, adapters = (asked, asked, "fp32") if model is None else _found(model)
    additions = [f" with={options.optimizer}"] if options.optimizer != "adamw" else []
    additions += [f" moe_backend={options.moe_backend}"] if options.moe_backend else []
    additions += [" uncompiled"] if options.no_compile else []
    return (
        f"layers={options.layers} lora={','.join(options.lora)} r={options.rank} "
        f"seq={options.seq} batch={options.micro_batch} checkpointing={options.checkpointing} "
        f"{experts}{'' if linear == 'bf16' else f' linear={linear}'} peer=unsloth "
        f"adapters={adapters}{''.join(additions)} "
        f"unsloth={version('unsloth')} unsloth_zoo={version('unsloth_zoo')}"
    )


def _found(model: nn.Module) -> tuple[str, str, str]:
    """How experts, attention's Linear layers and adapters are kept."""
    kinds: dict[str, set[str]] = {"experts": set(), "attn": set(), "lora": set()}
    for name, parameter in model.named_parameters():
        kind = next((k for k in ("lora", "experts", "attn") if k in name), None)
        if kind is not None and "norm" not in name:
            kinds[kind].add(_kept(parameter))
    experts, linear, adapters = ("/".join(sorted(kinds[k])) for k in ("experts", "attn", "lora"))
    return experts, linear, adapters


def _kept(parameter: nn.Parameter) -> str:
    state = getattr(parameter, "quant_state", None)  # bitsandbytes'
    if state is not None:
        return f"{state.quant_type}{'+double' if state.nested else ''}"
    words = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    return words.get(parameter.dtype, str(parameter.dtype))


def run(options: argparse.Namespace, folder: Path, device: torch.device, rows: Rows) -> None:
    """Load, adapt and train, as a user of Unsloth does."""
    from unsloth import FastLanguageModel

    checkpointing = CHECKPOINTING[options.checkpointing]
    start = time.perf_counter()
    model, _ = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=options.seq,
        load_in_4bit=options.load_in_4bit,
        use_gradient_checkpointing=checkpointing,
    )
    synchronize(device)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    release(device)
    held = allocated(device)
    model = FastLanguageModel.get_peft_model(
        model,
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=[
            *(TARGETS if "attention" in options.lora else ()),
            *(EXPERT_TARGETS if "experts" in options.lora else ()),
        ],
        use_gradient_checkpointing=checkpointing,
    )
    options.adapters = _found(model)[2]
    rows.start["setting"] = _setting(options, model)
    print(f"\n{rows.start['name']} {rows.start['setting']}", flush=True)
    rows.add("loading", "s", seconds)
    if device.type == "cuda":
        rows.add("peak while building", "bytes", peak)
        rows.add("model", "bytes", held)
    train(model, lambda model, batch: model(**batch).loss, options, device, rows)


def write_checkpoint(config: Any, folder: Path, device: torch.device) -> None:
    """A Qwen3-MoE in bf16 with a published checkpoint's names, as transformers initializes it.

    A folder that has one of this many layers already is left as it is.

    Args:
        config: Of the model.
        folder: Where to.
        device: Makes the random numbers.
    """
    from safetensors.torch import save_file

    file = folder / "model.safetensors.index.json"
    if (
        file.exists()
        and json.loads(file.read_text())["metadata"]["layers"] == config.num_hidden_layers
    ):
        return
    start = time.perf_counter()
    weights: dict[str, str] = {}
    total = 0
    writing: list[Future[None]] = []
    with ThreadPoolExecutor(WRITERS) as pool:
        for number in range(config.num_hidden_layers + 1):
            while sum(not done.done() for done in writing) > WRITERS:  # memory for few at a time
                time.sleep(0.01)
            tensors = _shard(config, number, device)
            shard = f"model-{number:05d}.safetensors"
            weights |= dict.fromkeys(tensors, shard)
            total += sum(tensor.nbytes for tensor in tensors.values())
            writing.append(pool.submit(save_file, tensors, folder / shard, {"format": "pt"}))
    for done in writing:
        done.result()
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    _write_tokenizer(folder)
    metadata = {"total_size": total, "layers": config.num_hidden_layers}
    file.write_text(json.dumps({"metadata": metadata, "weight_map": weights}))
    print(
        f"wrote {total / 1e9:.1f} GB to {folder} in {time.perf_counter() - start:.1f} s", flush=True
    )


def _shard(config: Any, number: int, device: torch.device) -> dict[str, Tensor]:
    """One layer's tensors on the CPU; after the last layer, what is outside of them."""
    H, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    experts, width = config.num_experts, getattr(config, "head_dim", None) or H // heads
    down = (H, config.moe_intermediate_size)

    def random(*shape: int) -> Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return made.normal_(0, config.initializer_range).cpu()

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    if number == config.num_hidden_layers:
        named = {"embed_tokens": random(config.vocab_size, H), "norm": ones(H)}
        made = {f"model.{name}.weight": tensor for name, tensor in named.items()}
        return made | {"lm_head.weight": random(config.vocab_size, H)}
    named = {
        "input_layernorm": ones(H),
        "post_attention_layernorm": ones(H),
        "self_attn.q_norm": ones(width),
        "self_attn.k_norm": ones(width),
        "self_attn.q_proj": random(heads * width, H),
        "self_attn.k_proj": random(kv * width, H),
        "self_attn.v_proj": random(kv * width, H),
        "self_attn.o_proj": random(H, heads * width),
        "mlp.gate": random(experts, H),
    }
    for projection, shape in (("gate", down[::-1]), ("up", down[::-1]), ("down", down)):
        for expert, weight in enumerate(random(experts, *shape)):
            named[f"mlp.experts.{expert}.{projection}_proj"] = weight
    return {f"model.layers.{number}.{name}.weight": tensor for name, tensor in named.items()}


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<eos>": 1, "<pad>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>",
        eos_token="<eos>",
        pad_token="<pad>",
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
