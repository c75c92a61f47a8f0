"""Extrapolates measured steps and communication to many GPUs and large models; many_gpus.md.

    python tools/bench/extrapolate.py                         the whole page, minutes on a CPU
    python tools/bench/extrapolate.py --models qwen3-30b-a3b --gpus 8,64 --out /tmp/page.md

It reads results/two_gpu.csv and two_gpu_first.csv (steps on one and two GPUs), and
two_gpu_comm.csv and two_gpu_comm_first.csv (collectives). Where the first of a pair has rows of an
engine, those of the second are not used for it. Memory is what `moe_qlora.plan` says, and nothing
is measured here: run it again after new rows have come. Times are those of `scaling.py`.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from common import RESULTS
from scaling import HOPS, NODE, Row, Speed, Way, Work, fit, step_seconds, way_of
from shapes import SHAPES, WHOLE
from torch import nn

import moe_qlora
from moe_qlora.lora.config import top_k_of
from moe_qlora.memory.budget import Engine, Settings
from moe_qlora.memory.devices import reserve_nbytes
from moe_qlora.memory.engines import Sharding
from moe_qlora.memory.planner import Planner
from moe_qlora.memory.source import source_of

PAGE = Path(__file__).parent / "many_gpus.md"
GPUS = (8, 16, 64, 256, 1024)
H200 = 139 << 30  # what torch reports of one, rounded down
BATCH, SEQ, RANK = 4, 4096, 16
NETWORKS = {"400 Gb/s": 45e9, "100 Gb/s": 11.25e9}
"""Bytes a second that each GPU's own network card moves: nine tenths of its name, assumed."""
GB = 1e9

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": ("qwen3_moe", {**SHAPES["qwen3-30b-a3b"][1], **WHOLE["qwen3-30b-a3b"]}),
    "glm-4.5-air": ("glm4_moe", {**SHAPES["glm-4.5-air"][1], **WHOLE["glm-4.5-air"]}),
    "qwen3-235b-a22b": ("qwen3_moe", {
        **SHAPES["qwen3-235b-a22b"][1], **WHOLE["qwen3-235b-a22b"]}),
    "glm-4.6": ("glm4_moe", {
        "hidden_size": 5120, "moe_intermediate_size": 1536, "n_routed_experts": 160,
        "num_experts_per_tok": 8, "num_hidden_layers": 92, "vocab_size": 151552,
        "intermediate_size": 12288, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "first_k_dense_replace": 3, "n_shared_experts": 1}),
    "deepseek-v3": ("deepseek_v3", {**SHAPES["deepseek-v3"][1], **WHOLE["deepseek-v3"]}),
    "kimi-k2": ("deepseek_v3", {
        **SHAPES["deepseek-v3"][1], "n_routed_experts": 384, "num_hidden_layers": 61,
        "vocab_size": 163840, "intermediate_size": 18432, "num_attention_heads": 64,
        "num_key_value_heads": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
}  # fmt: skip
"""Model types and published sizes."""
DRAWN = ("qwen3-30b-a3b", "qwen3-235b-a22b", "glm-4.6", "deepseek-v3", "kimi-k2")
"""The models that have a table."""


# Rows


_ENGINE = {"single": "single", "ddp": "ddp", "fsdp2": "fsdp", "whole": "fsdp", "ep": "ep"}


def read_rows(folder: Path = RESULTS) -> list[Row]:
    """Return the runs of both files, those that failed or kept layers gathered left out.

    Expert parallelism gathers tokens on up to four ranks and sends them on more, which is what the
    page asks for: of its runs those count that sent them.
    """
    rows = []
    for name in ("two_gpu.csv", "two_gpu_first.csv"):
        for line in _lines(folder / name):
            engine, note = line["engine"], line.get("note") or ""
            measured = line["step_s"] or line["tokens_per_s"]
            usual = "LoRA" not in note or f"r={RANK} experts,attention" in note
            kept = "no reshard" in note or "keep" in note
            sent = engine != "ep" or ("all-to-all" in note and "fused" not in note)
            if engine not in _ENGINE or not measured or not usual or kept or not sent:
                continue
            gpus, batch, seq = (int(line[key]) for key in ("gpus", "micro_batch", "seq"))
            step = float(line["step_s"] or gpus * batch * seq / float(line["tokens_per_s"]))
            sizes = [float(line[k]) if line[k] else None for k in ("model_gb", "train_peak_gb")]
            rows.append(
                Row(
                    name, _ENGINE[engine], engine, gpus, line["model"], int(line["layers"]),
                    seq, batch, step, line.get("adapters") or "bfloat16", *sizes,
                )
            )  # fmt: skip
    return rows


def bus_bandwidth(folder: Path = RESULTS) -> float:
    """Return the bytes a second that a GPU moves in an all-gather, measured within one machine."""
    lines = _lines(folder / "two_gpu_comm.csv") or _lines(folder / "two_gpu_comm_first.csv")
    gathers = [line for line in lines if line["operation"] == "all_gather"]
    largest = max(gathers, key=lambda line: int(line["nbytes"]))
    ranks, nbytes = int(largest["gpus"]), int(largest["nbytes"])
    return nbytes * (ranks - 1) / ranks / float(largest["seconds"])


def _lines(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# A model's sizes


def planner_of(model: str, layers: int | None, *, batch: int, adapters: str, linears: bool) -> Any:
    """Return the planner of a model; `linears` packs its Linear layers too."""
    from transformers import CONFIG_MAPPING, BitsAndBytesConfig

    model_type, sizes = MODELS[model]
    if layers is not None:
        sizes = {**sizes, "num_hidden_layers": layers}
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype="bfloat16",
    )
    config = CONFIG_MAPPING[model_type](**sizes, dtype="bfloat16")
    settings = Settings(batch, SEQ, RANK, "attention,experts", adapters)
    source = source_of(config, quantization, None, False)
    return Planner(replace(source, linears=linears), settings)


def work_of(planner: Any) -> Work:
    """Return what a step of a planner's model computes and moves."""
    model, layout = planner.source.build(), planner.meta.layout
    text = planner.source.config.get_text_config()
    top_k, layers = top_k_of(text) or 1, text.num_hidden_layers
    experts = {param.name: param.num_experts for param in layout.experts}
    weights = sum(
        parameter.numel() * (top_k / experts[name] if name in experts else 1)
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not isinstance(_owner(model, name), nn.Embedding)
    )
    trained = [
        (tensor, block) for block in planner.meta.blocks for tensor in block.tensors
        if tensor.part == "trained"
    ]  # fmt: skip
    active = sum(
        tensor.numel * (top_k / max(experts.values()) if tensor.of_experts else 1)
        for tensor, _ in trained
    )
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    query, value = (getattr(text, key, None) or head for key in ("qk_head_dim", "v_head_dim"))
    # Two products with half of the sequence, forward twice and backward twice as much.
    attention = layers * 4 * SEQ * text.num_attention_heads * (query + value)
    sharding = Sharding(Engine("fsdp", 2), text.hidden_size)
    gathered = {
        layer: sum(
            sharding.whole(tensor)
            for block in planner.meta.blocks
            if block.layer is layer
            for tensor in block.tensors
        )
        for layer in (True, False)
    }
    of_experts = sum(t.numel * t.itemsize for t, _ in trained if t.of_experts)
    return Work(
        layers=layers,
        expert_layers=len({param.module_name for param in layout.experts}),
        # Base weights have no gradients; a factor of LoRA has.
        flops=6 * weights + 8 * active + attention,
        layer_bytes=gathered[True],
        root_bytes=gathered[False],
        expert_gradients=of_experts,
        other_gradients=sum(t.numel * t.itemsize for t, _ in trained) - of_experts,
        row_bytes=top_k * text.hidden_size * 2,
    )


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


# The page


def ways(gpus: int, experts: int) -> list[Way]:
    """Return the ways to train on so many GPUs."""
    listed = [Way("ddp", gpus, 1), Way("fsdp", gpus, gpus)]
    if gpus > NODE:
        listed.insert(1, Way("fsdp", gpus, NODE))
    groups = [group for group in (8, 16, 64) if group <= gpus and experts % group == 0]
    return listed + [Way("ep", gpus, group) for group in groups]


def table(heading: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def check_table(rows: Sequence[Row], work: Callable[[Row], Work], speed: Speed) -> str:
    """Return measured figures beside those of the model, with the ratio."""

    def beside(measured: float | None, said: float) -> list[str]:
        if measured is None:
            return [f"{said:.1f}", "-", "-"]
        return [f"{said:.1f}", f"{measured:.1f}", f"{said / measured:.2f}"]

    lines = []
    for row in rows:
        made = _row_planner(row)
        peak = made.peak(row.batch, row.seq)
        held = peak.parts["adapters"] + made.resident
        held += peak.parts.get("gradient buckets", 0) if "first" in row.source else 0
        tokens = row.batch * row.seq
        step = step_seconds(work(row), way_of(row), tokens, speed, speed.bus)
        speeds = [row.gpus * tokens / seconds for seconds in (step, row.step)]
        lines.append(
            [
                f"{row.label}, {row.gpus}", str(row.layers), str(row.batch), f"`{row.source}`",
                f"{speeds[0]:,.0f}", f"{speeds[1]:,.0f}", f"{speeds[0] / speeds[1]:.2f}",
                *beside(row.resident, held / GB), *beside(row.peak, peak.nbytes / GB),
            ]
        )  # fmt: skip
    heading = ["run, GPUs", "layers", "micro-batch", "rows", "tokens/s, model", "measured", "ratio"]
    for name in ("held", "peak"):
        heading += [f"{name} GB, plan", "measured", "ratio"]
    return table(heading, lines)


@cache
def _base_planner(model: str, layers: int, batch: int, adapters: str) -> Any:
    return planner_of(model, layers, batch=batch, adapters=adapters, linears=False)


def _row_planner(row: Row) -> Any:
    base = _base_planner(row.model, row.layers, row.batch, row.adapters)
    return base if row.engine == "single" else base.with_engine(Engine(row.engine, row.gpus))


def model_table(model: str, gpus: Sequence[int], speed: Speed) -> str:
    """Return what each way to train one model takes, on so many GPUs."""
    base = planner_of(model, None, batch=BATCH, adapters="bfloat16", linears=True)
    work = work_of(base)
    experts = max(param.num_experts for param in base.meta.layout.experts)
    tokens = BATCH * SEQ

    @cache
    def memory(engine: str, group: int) -> tuple[int, int, int]:
        made = base.with_engine(Engine(engine, group))
        return made.resident, made.load_peak, made.peak(BATCH, SEQ).nbytes

    lines = []
    for count in gpus:
        options = []
        for way in ways(count, experts):
            resident, load, peak = memory(way.engine, count if way.engine == "ddp" else way.group)
            needed = max(peak + reserve_nbytes(peak), load + reserve_nbytes(0))
            steps = [step_seconds(work, way, tokens, speed, net) for net in NETWORKS.values()]
            options.append((way, needed <= H200, (resident, load, peak), steps))
        fitting = [option for option in options if option[1]]
        best = min(fitting, key=lambda option: option[3][0])[0] if fitting else None
        for way, fits, sizes, steps in options:
            name = f"**{way.name}**" if way == best else way.name
            lines.append(
                [
                    f"{count:,}", name, *(f"{size / GB:.1f}" for size in sizes),
                    "yes" if fits else "no", f"{steps[0]:.2f}",
                    *(f"{count * tokens / step:,.0f}" if fits else "-" for step in steps),
                ]
            )  # fmt: skip
    heading = ["GPUs", "engine", "model GB", "loading GB", "peak GB", "fits", "step s"]
    heading += [f"tokens/s at {name}" for name in NETWORKS]
    billions = sum(parameter.numel() for parameter in base.source.build().parameters()) / 1e9
    title = (
        f"### {model}\n\n{billions:,.0f} B weights, {base.resident / GB:,.1f} GB packed; a token "
        f"takes {work.flops / 1e9:,.0f} GFLOP, of which LoRA and attention are part.\n\n"
    )
    return title + table(heading, lines)


def page(models: Sequence[str], gpus: Sequence[int]) -> str:
    """Return the whole page."""
    rows, bus = read_rows(), bus_bandwidth()
    known = [row for row in rows if row.model in MODELS]

    @cache
    def work(model: str, layers: int, adapters: str) -> Work:
        return work_of(_base_planner(model, layers, BATCH, adapters))

    def work_of_row(row: Row) -> Work:
        return work(row.model, row.layers, row.adapters)

    speed = fit(known, work_of_row, bus)
    fitted = {
        "host, ms a layer": f"{speed.host * 1e3:.2f}",
        "TFLOP/s": f"{speed.flops / 1e12:.0f}",
        **{f"{name}, ms a layer": f"{cost * 1e3:.2f}" for name, cost in speed.engine.items()},
        "all-gather, GB/s a GPU": f"{bus / GB:.0f}",
    }
    parts = [
        TEXT.format(networks=" and ".join(NETWORKS), nvlink=HOPS["nvlink"] * 1e6,
                    network=HOPS["network"] * 1e6, version=moe_qlora.__version__),
        table(list(fitted), [list(fitted.values())]),
        CHECK,
        check_table(known, work_of_row, speed),
        TABLES.format(batch=BATCH, seq=SEQ, rank=RANK),
        *(model_table(model, gpus, speed) for model in models),
    ]  # fmt: skip
    return "\n".join(parts)


TEXT = """# Many GPUs, extrapolated

Written by `python tools/bench/extrapolate.py`: change that script or `scaling.py`, or add rows,
and run it again. **Nothing over two GPUs was measured.** Memory is what `moe_qlora.plan` of
version {version} says. Times follow from one and two H200s (`two_gpu.csv` once it is
there, [two_gpu_first.csv](results/two_gpu_first.csv),
[two_gpu_comm_first.csv](results/two_gpu_comm_first.csv)) by these assumptions:

- Every rank has its own micro-batch (weak scaling), and computes as fast as one GPU alone: FLOPs
  a second, and the host's time a layer, are those fitted to Qwen3-30B-A3B. Larger matrices are
  usually quicker, slower hosts slower.
- Nodes of 8 GPUs. Within one, a collective moves what was measured between two GPUs. Between
  nodes each GPU has a network card of its own, of {networks}, of which
  nine tenths are used; a ring through all GPUs of several nodes uses all cards.
- Rings: {nvlink:.0f} us a hop within a node, {network:.0f} us between nodes, assumed. NCCL's other
  algorithms take fewer hops on many GPUs.
- The collectives of DDP and FSDP2 are hidden behind compute as far as that lasts, the all-to-alls
  of expert parallelism are not hidden at all. Routers are even; an uneven one makes all ranks
  wait for the fullest.
- An engine's own cost a layer (hooks, copies, streams) is fitted to two GPUs and does not depend
  on the model. Where no row has an engine, it is 0, which is too good.

Fitted:
"""

CHECK = """
## Checked against what was measured

The model's figures, the measured ones, and the first over the second. Speeds were fitted to
`single` and to each engine's rows of the newer file; memory was fitted to nothing. "Held" is what
a rank has before the first step; in `two_gpu.csv` that is its parameters, to which the statistics
of a single process and the buffers of an engine do not belong. `whole` was built whole and then
sharded; the first such run kept its statistics whole on each rank (0.2 GB). The first run of DDP
held 1.3 GB more at its peak than is planned, as much as another set of buckets; why is not known.
"""

TABLES = """
## Models

H200s, {seq:,} tokens a sequence, micro-batch {batch} on each GPU, gradient checkpointing, LoRA
r={rank} in bf16 on attention and all experts, AdamW, everything in nf4 with double quantization.
`fsdp 8 x 2 copies` is FSDP2 in groups of 8 ranks, of which each holds the model (HSDP); `ep 8 x 2
copies` divides experts over 8 ranks, with DDP for the rest. "Loading" is the most while a rank
loads its share; "fits" counts the CUDA context, gaps and loading. The quickest that fits is bold.
"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(DRAWN))
    parser.add_argument("--gpus", default=",".join(map(str, GPUS)))
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    counts = [int(word) for word in options.gpus.split(",")]
    text = page([name for name in options.models.split(",") if name], counts)
    options.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
