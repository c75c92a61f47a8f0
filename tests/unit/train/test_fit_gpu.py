"""`fit_memory` of a sharded model on a GPU, against what its steps take."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moe_qlora
from moe_qlora.planning import levels
from moe_qlora.train.fit import _OF_GRAPHS
from tests.helpers.graphed import packed
from tests.helpers.ranks import one_of_ranks, sharded

SIZES = {
    "hidden_size": 2048, "moe_intermediate_size": 1024, "num_experts": 48, "num_hidden_layers": 6,
    "vocab_size": 8192,
}  # fmt: skip


def measured_peak(model) -> int:
    """The most bytes of tensors in steps of AdamW, with all that graphs' pool holds."""
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], fused=True)
    torch.cuda.reset_peak_memory_stats()
    for step in range(4):
        ids = torch.randint(8192, (1, 1024), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
    of_graphs = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    unused = sum(each["total_size"] - each["allocated_size"] for each in of_graphs)
    return torch.cuda.max_memory_allocated() + unused


@pytest.mark.filterwarnings("ignore::UserWarning")  # Of compilers on GPUs, which raise them
@pytest.mark.gpu
@pytest.mark.parametrize("level", [levels.KEEP, levels.RECOMPUTE, "no graphs"])
def test_the_plan_of_one_of_four_ranks_is_what_its_steps_take(level):
    with one_of_ranks(4):
        mesh = init_device_mesh("cuda", (4,))
        model = sharded(packed(config=SIZES), mesh=mesh)
        sizes = {"batch_size": 1, "seq_len": 1024}
        memory = 64 << 30
        if level != levels.KEEP:
            with moe_qlora.prepare_training(model, **sizes, memory=memory) as prepared:
                memory = prepared.fit._needed(prepared.fit._activities[levels.RECOMPUTE])
        memory -= level == "no graphs"
        with moe_qlora.prepare_training(model, **sizes, memory=memory) as prepared:
            fit = prepared.fit
            assert (prepared.graphs is None) == (level == "no graphs")
            fit._room = 0  # No layer stays gathered
            planned = fit._needs / (1 + fit._gaps) - _OF_GRAPHS * fit.graphs_fit
            measured = measured_peak(model)
            assert 0.9 * planned <= measured <= planned + _OF_GRAPHS * fit.graphs_fit, str(prepared)
