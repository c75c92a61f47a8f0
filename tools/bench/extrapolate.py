"""Extrapolates measured steps to 8, 64 and 1,024 GPUs by arithmetic; writes many_gpus.md.

    python tools/bench/extrapolate.py                    on a CPU; plans memory, runs nothing

A step of N ranks, each with a micro-batch of its own, is the step of one GPU, and

    ddp     layers x DDP_LAYER, and what of the gradients' all-reduce, 2 (n - 1) / n bytes, takes
            longer than backward, two thirds of the step
    fsdp    layers x FSDP_LAYER, and two all-gathers and a reduce-scatter of each layer, none of
            them hidden: (n - 1) / n bytes each over the slowest link, and a hop for each rank
"""

from __future__ import annotations

from common import RESULTS

from moe_qlora.planning.budget import Engine, Settings
from moe_qlora.planning.devices import reserve_nbytes
from moe_qlora.planning.meta_model import source_of
from moe_qlora.planning.planner import Planner

PAGE = RESULTS.with_name("many_gpus.md")
H200 = 139 << 30
NODE = 8  # GPUs
NVLINK, NETWORK = 240e9, 45e9  # bytes a second and GPU: measured; nine tenths of 400 Gb/s
NVLINK_HOP, NETWORK_HOP = 3e-6, 10e-6  # seconds, assumed
DDP_LAYER, FSDP_LAYER = 0.54e-3, 0.40e-3  # seconds that the engine itself takes, of two GPUs
RUNS = {
    "qwen3-30b-a3b": (4, 16384 / 10649, "model.csv: one H200, 10,649 tokens/s"),
    "glm-4.5-air": (1, None, "two_gpu.csv, c54903d: FSDP2 on two H200s, a step of 1.578 s"),
}
"""Micro-batch of 4,096 tokens, the step of one GPU in seconds, and its row."""
GLM_STEP = 1.578
SEQ, RANK = 4096, 16


class Model:
    """A model of `RUNS`, whose memory is planned."""

    def __init__(self, name: str) -> None:
        self.name, (self.batch, step, self.row) = name, RUNS[name]
        settings = Settings(self.batch, SEQ, RANK, "attention,experts", "bfloat16")
        self.planner = Planner(source_of(name, None), settings)
        blocks = self.planner.meta.blocks
        self.layers = sum(block.layer for block in blocks)
        self.weights = self.planner.resident
        self.gradients = 2 * sum(sum(block.trained) for block in blocks)
        self.step = step or GLM_STEP - self._fsdp(2)

    def seconds(self, engine: str, group: int, gpus: int) -> float:
        """A step on so many GPUs, `group` of which share a model under FSDP2."""
        if engine == "ddp":
            return self.step + self.layers * DDP_LAYER + self._reduced(gpus, self.gradients)
        copies = self._reduced(gpus // group, self.gradients / group) if group < gpus else 0.0
        return self.step + self._fsdp(group) + copies

    def needed(self, engine: str, group: int) -> int:
        """Bytes of a rank at its peak, with its reserve, or while it loads."""
        planner = self.planner.with_engine(Engine(engine, group))
        peak = planner.peak(self.batch, SEQ).nbytes
        return max(peak + reserve_nbytes(peak), planner.load_peak + reserve_nbytes(0))

    def _fsdp(self, ranks: int) -> float:
        within = ranks <= NODE
        moved = (2 * self.weights + 3 * self.gradients) * (ranks - 1) / ranks
        hops = 3 * self.layers * (ranks - 1) * (NVLINK_HOP if within else NETWORK_HOP)
        return self.layers * FSDP_LAYER + moved / (NVLINK if within else NETWORK) + hops

    def _reduced(self, ranks: int, nbytes: float) -> float:
        link, hop = (NVLINK, NVLINK_HOP) if ranks <= NODE else (NETWORK, NETWORK_HOP)
        taken = 2 * (ranks - 1) / ranks * nbytes / link + 2 * (ranks - 1) * hop
        return max(taken - self.step * 2 / 3, 0.0)

    def rows(self, counts: list[int]) -> list[str]:
        """The rows of the table."""
        lines = []
        for gpus in counts:
            for engine, group in dict.fromkeys((("ddp", gpus), ("fsdp", NODE), ("fsdp", gpus))):
                needed, seconds = self.needed(engine, group), self.seconds(engine, group, gpus)
                speed = f"{gpus * self.batch * SEQ / seconds:,.0f}" if needed <= H200 else "no fit"
                way = f"{engine} {group}" + (f" x {gpus // group}" if group < gpus else "")
                cells = [self.name, f"{gpus:,}", way, f"{needed / 2**30:.1f}", f"{seconds:.2f}"]
                lines.append("| " + " | ".join([*cells, speed]) + " |")
        return lines


TEXT = """# Many GPUs, extrapolated

Written by `python tools/bench/extrapolate.py`, by arithmetic. **Nothing over four GPUs was
measured.** LoRA r={rank} in bf16 on attention and all experts, AdamW, gradient checkpointing, all
packed to nf4 with double quantization, {seq:,} tokens a sequence, one micro-batch on each H200
({batches}). `fsdp 8 x 2` is FSDP2 in groups of 8 ranks, each of
which holds the model (HSDP). GiB are those of a rank, by `moe_qlora.plan`, with CUDA's context and
gaps.

| model | GPUs | engine | GiB | step s | tokens/s |
| --- | --- | --- | --- | --- | --- |
{table}

The steps of one GPU come from:

{rows}

- Every rank computes as fast as one GPU alone, and has as many tokens (weak scaling).
- Nodes of {node} GPUs. Within one, {nvlink:.0f} GB/s a GPU, as measured between two; between nodes
  {network:.0f}, nine tenths of a network card of 400 Gb/s for each GPU. Rings: {hop:.0f} us a hop
  within a node, {far:.0f} us between nodes, assumed; NCCL's trees take fewer.
- All-reduces of gradients are hidden behind backward. **Nothing of FSDP2's gathers is**: 16 layers
  of Qwen3-30B-A3B that stayed gathered after forward, and so were gathered once, took 12.8 ms less,
  and by this arithmetic one gather takes 12.6.
- An engine's own time a layer (hooks, copies, waits of the host) is that of two GPUs: {ddp:.2f} ms
  under DDP, {fsdp:.2f} under FSDP2. It depends on neither model nor tokens.

So take DDP where one GPU holds the model, groups of one machine under FSDP2 where it does not, and
FSDP2 over machines only where a machine is too small: rings between machines cost more than a step.
"""


def page(counts: list[int]) -> str:
    """Return the whole page."""
    models = [Model(name) for name in RUNS]
    table = [row for model in models for row in model.rows(counts)]
    return TEXT.format(
        rank=RANK, seq=SEQ, node=NODE, table="\n".join(table), nvlink=NVLINK / 1e9,
        network=NETWORK / 1e9, hop=NVLINK_HOP * 1e6, far=NETWORK_HOP * 1e6,
        batches=", ".join(f"{model.batch} of {model.name}" for model in models),
        rows="\n".join(f"- {model.name}: {model.row}" for model in models),
        ddp=DDP_LAYER * 1e3, fsdp=FSDP_LAYER * 1e3,
    )  # fmt: skip


def main() -> None:
    """Write the page."""
    PAGE.write_text(page([8, 64, 1024]), "utf-8")


if __name__ == "__main__":
    main()
