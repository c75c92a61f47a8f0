"""Steps whose layers are recorded by `torch.cuda.make_graphed_callables`, beside our own graphs.

    python tools/bench/graphed_callables.py [--layers 8]           qwen3-30b-a3b, one GPU
    python tools/bench/graphed_callables.py --tiny --device cpu    whether it runs, without graphs

Options are those of model.py, with `--prepare`. One random model is prepared twice; the second time
graphs are torch's, of each layer behind a module of tensors without hooks; an error is printed.
"""

from __future__ import annotations

import gc
import traceback
from contextlib import ExitStack
from typing import Any

import torch
from common import Rows, environment, release
from model import DEVICE, Packer, _options, _setting, adapt, build, train
from shapes import quantization, whole_config
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import moe_qlora
from moe_qlora.kernels import workspace
from moe_qlora.train.layers import LayerRunner, decoder_layers, runner_of


def main() -> None:
    """Run both, one after the other."""
    options = _options()
    options.prepare = options.fit = options.prepare or DEVICE
    options.checkpointing, options.liger_loss, options.compile = False, True, True
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    config = whole_config(options.model, layers=options.layers, tiny=options.tiny)
    torch.manual_seed(0)
    model = build(config, device, Packer("ours", config).visit)
    moe_qlora.quantize_experts(model, quantization())
    peft_model = adapt("ours", model, options).train()
    setting = _setting("ours", options, config.get_text_config().num_hidden_layers)
    for graphs in ("ours", "make_graphed_callables"):
        print(f"\n{options.model} {setting} graphs={graphs}", flush=True)
        named = options.model, f"{setting} recorder={graphs}"
        rows = Rows(options.out, environment(device, options.commit), *named)
        release(device)
        free = (
            "64GiB" if device.type == "cpu" else None
        )  # There, layers have runners if it is given
        memory = free if options.fit == DEVICE else options.fit
        sizes = {"batch_size": options.micro_batch, "seq_len": options.seq, "memory": memory}
        with ExitStack() as stack:
            prepared = stack.enter_context(moe_qlora.prepare_training(peft_model, **sizes))
            print(prepared, flush=True)
            try:
                if graphs != "ours":
                    stack.enter_context(record(prepared, peft_model, options, device))
                train(peft_model, options, device, rows)
            except Exception as error:  # noqa: BLE001 - which is a result
                traceback.print_exc()
                rows.fail(error)


class Layer(nn.Module):
    """A decoder layer as a function of tensors, hidden states first, in one kind of call."""

    def __init__(self, runner: LayerRunner, level: str, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.runner = [runner]  # In a list, since frozen weights are no part of this
        self.level, (leaves, self.structure) = level, tree_flatten((args, kwargs))
        self.leaves = [Tensor if isinstance(each, Tensor) else each for each in leaves]
        x, *others = (each for each in leaves if isinstance(each, Tensor))
        self.inputs = (x.detach().clone().requires_grad_(x.requires_grad), *others)
        self.trained = nn.ParameterList(p for p in runner.layer.parameters() if p.requires_grad)

    def forward(self, *tensors: Tensor) -> Any:
        given, runner = iter(tensors), self.runner[0]
        leaves = [next(given) if each is Tensor else each for each in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return type(runner).compute(runner, self.level, args, kwargs, preserve_rng_state=False)


def record(prepared: Any, model: Any, options: Any, device: torch.device) -> ExitStack:
    """Put torch's graphs in the place of the layers' computation; return how to undo it."""
    if prepared.graphs is not None:
        prepared.graphs.remove()
    layers: dict[LayerRunner, Layer] = {}
    undo = ExitStack()

    def computing(runner: LayerRunner) -> Any:
        def compute(level: str, args: Any, kwargs: Any, **how: Any) -> Any:
            if (layer := layers.get(runner)) is None:  # In the first step
                layers[runner] = Layer(runner, level, args, kwargs)
                return type(runner).compute(runner, level, args, kwargs, **how)
            leaves, structure = tree_flatten((args, kwargs))
            if level != layer.level or structure != layer.structure:
                raise ValueError(f"the layer was recorded for another call: {level}, {structure}")
            return layer(*(each for each in leaves if isinstance(each, Tensor)))

        return compute

    for runner in filter(None, map(runner_of, decoder_layers(model).values())):
        runner.compute = computing(runner)  # type: ignore[method-assign]
        undo.callback(vars(runner).pop, "compute")
    ids = torch.zeros((options.micro_batch, options.seq), dtype=torch.long, device=device)
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    gc.collect()  # Nodes of this step would let the recording wait for the default stream
    if device.type == "cuda":
        every, samples = tuple(layers.values()), tuple(each.inputs for each in layers.values())
        with workspace.recorded(device):
            torch.cuda.make_graphed_callables(every, samples, allow_unused_input=True)
            undo.callback(list, workspace.buffers(device))  # Referenced: graphs write to them
    return undo


if __name__ == "__main__":
    main()
