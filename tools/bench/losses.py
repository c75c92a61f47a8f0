"""Compares losses of 30 steps, plain and under what makes steps faster; losses.csv.

    python tools/bench/losses.py                        4 layers of qwen3-30b-a3b, 2,048 tokens
    python tools/bench/losses.py --tiny --device cpu    whether it runs, plain alone

Every variant starts from the same weights and sees the same five batches, six times. "plain again"
says how far two runs of the same are apart: the gradients of attention are summed in any order.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import additions
import building
import model as bench
import torch
from common import RESULTS, Rows, environment, release, release_workspace
from safetensors import safe_open
from shapes import name_of, whole_config
from torch import nn

VARIANTS = (
    *("plain", "plain again", "liger", "graphs", "liger,graphs", "liger,compile,graphs"),
    *("graphs-keep", "liger,compile,graphs-keep", "liger,compile,graphs,fit", "fit"),
)
STEPS, BATCHES, VOCABULARY = 30, 5, 2000


def main() -> None:
    """Train every variant, and record its losses and how far they are from the plain ones."""
    options = _options()
    device = torch.device(options.device)
    config = whole_config(options.model, layers=options.layers, tiny=options.tiny)
    where = environment(device, options.commit)
    plain: list[float] = []
    files: dict[str, tuple[int, ...]] = {}
    for variant in VARIANTS[: 1 if device.type == "cpu" else None]:
        setting = f"layers={config.num_hidden_layers} seq={options.seq} variant={variant}"
        rows = Rows(options.out, where, name_of(options.model), setting)
        losses, shapes = train(config, variant.split(","), options, device)
        plain, files = plain or losses, files or shapes
        for step, loss in enumerate(losses):
            rows.add(f"loss of step {step}", "nats", loss)
        differences = [abs(a - b) for a, b in zip(losses, plain, strict=True)]
        rows.add("largest difference from plain", "nats", max(differences))
        rows.add(
            "tensors of the adapter's file that differ",
            "tensors",
            len(set(files.items()) ^ set(shapes.items())),
        )
        gc.collect()
        release_workspace()
        release(device)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "losses.csv")
    parser.add_argument("--commit", help="for a copy of the tree without its history")
    return parser.parse_args()


def train(
    config: Any, added: list[str], options: argparse.Namespace, device: torch.device
) -> tuple[list[float], dict[str, tuple[int, ...]]]:
    """Return the losses, and the names and shapes of the saved adapter."""
    settings = argparse.Namespace(
        checkpointing=not {"fit", "graphs-keep"} & {*added}, lora=["experts", "attention"],
        rank=16, adapters="bf16", micro_batch=1, seq=options.seq,
        liger="liger" in added, liger_loss="liger-loss" in added, compile="compile" in added,
        merge_lora="merge-lora" in added,
        graphs=bool({"graphs", "graphs-keep"} & {*added}), graphs_keep="graphs-keep" in added,
        fit=additions.DEVICE if "fit" in added else None, offload=None, data="fixed",
        expert_rank=None, prepare=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = building.build(config, device, building.Packer("ours", config).visit)
    building.pack(model, device, None)
    adapted = bench.adapt("ours", model, settings)
    torch.manual_seed(7)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=1e-3)
    additions.add(adapted, settings, fits=True)
    adapted.train()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(1)
    vocabulary = min(VOCABULARY, config.get_text_config().vocab_size)
    shape = (1, options.seq)
    batches = [torch.randint(vocabulary, shape, generator=generator) for _ in range(BATCHES)]
    losses = []
    with additions.prepared(adapted, settings, fits=True) as graphs:
        for step in range(2 if options.tiny else STEPS):
            ids = batches[step % BATCHES].to(device)
            loss = adapted(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        if graphs is not None:
            print(f"recorded: {graphs.recorded}")
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)
        with safe_open(f"{folder}/adapter_model.safetensors", "pt") as file:
            return losses, {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a mapping


if __name__ == "__main__":
    main()
