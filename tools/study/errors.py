"""What each codec does to each expert, beside how often the expert is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import moe_qlora

from . import codecs
from .grid import CODECS
from .train import Data, autocast

BATCHES = 16
ROWS = 32


def by_expert(folder: Path, data: Data) -> Iterator[list[dict[str, Any]]]:
    """Yield, for each codec, a row for each expert of each layer.

    `weight_error` is ||W' - W|| / ||W|| of all three matrices; `output_error` is ||f'(x) - f(x)|| /
    ||f(x)|| over the rows x of held-out text that the router of the bf16 model sends there, None
    where it sends none. `use_code` and `use_text` are shares of a layer's assignments, on what the
    base was trained on and on what it is adapted to; 1 / E where all experts are used equally.
    """
    plain = codecs.load(folder, "bf16", data.device)
    use = {name: _use(plain, data, name) for name in ("code", "text")}
    inputs = _inputs(plain, data)
    for codec in CODECS[1:]:
        packed = codecs.load(folder, codec, data.device)
        rows = []
        for layer, (name, (x, index)) in enumerate(inputs.items()):
            exact, stored = plain.get_submodule(name), packed.get_submodule(name)
            matrices = [
                [getattr(m, key).detach().float() for key in ("gate_up_proj", "down_proj")]
                for m in (exact, stored)
            ]
            for expert in range(len(matrices[0][0])):
                mine, theirs = ([weight[expert] for weight in pair] for pair in matrices)
                tokens = x[(index == expert).any(-1)].float()
                rows.append(
                    {
                        "codec": codec, "layer": layer, "expert": expert,
                        "use_code": use["code"][name][expert].item(),
                        "use_text": use["text"][name][expert].item(),
                        "tokens": len(tokens),
                        "weight_error": _ratio(
                            torch.cat([w.flatten() for w in theirs]),
                            torch.cat([w.flatten() for w in mine]),
                        ),
                        "output_error": _ratio(
                            _output(exact, tokens, theirs), _output(exact, tokens, mine)
                        ) if len(tokens) else None,
                    }
                )  # fmt: skip
        yield rows


def rarity(folder: Path, data: Data) -> np.ndarray[Any, Any]:
    """Return how rarely used each held-out token's experts are, `(N, length)`.

    The mean over layers and assignments of 1 / (E u), with u the expert's share of its layer's
    assignments on held-out text: 1 where all experts are used equally, more for rare ones.
    """
    model = codecs.load(folder, "bf16", data.device)
    held = data.held("text")
    use = {n: c.double() for n, c in moe_qlora.expert_use(model, held.split(ROWS)).items()}
    total: Tensor | float = 0.0
    for name, (_, index) in _inputs(model, data).items():
        share = (use[name] / use[name].sum()).to(index.device)
        total = total + (1 / (len(share) * share[index])).mean(-1)
    assert isinstance(total, Tensor)
    return (total / len(use)).view(held.shape).float().cpu().numpy()


def _use(model: Any, data: Data, name: str) -> dict[str, Tensor]:
    batches = data.batches(name, ROWS, 7)
    counts = moe_qlora.expert_use(model, [next(batches) for _ in range(BATCHES)])
    return {key: each / each.sum() for key, each in counts.items()}


@torch.no_grad()
def _inputs(model: Any, data: Data) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what each experts module gets of the held-out text: rows and their top-k experts."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    handles = []
    for module in moe_qlora.detect(model).modules:
        parts = seen.setdefault(module.name, [])

        def note(
            _: Any, args: Any, kwargs: Any, parts: list[tuple[Tensor, Tensor]] = parts
        ) -> None:
            values = [*args, *kwargs.values()]
            parts.append((values[0].detach(), values[1].detach()))

        submodule = model.get_submodule(module.name)
        handles.append(submodule.register_forward_pre_hook(note, with_kwargs=True))
    model.eval()
    for rows in data.held("text").split(ROWS):
        with autocast(data.device):
            model(input_ids=rows, use_cache=False)
    for handle in handles:
        handle.remove()
    return {
        n: (torch.cat([x for x, _ in p]), torch.cat([i for _, i in p])) for n, p in seen.items()
    }


def _output(module: Any, x: Tensor, weights: list[Tensor]) -> Tensor:
    gate, up = (x @ weights[0].t()).chunk(2, -1)
    return (module.act_fn(gate) * up) @ weights[1].t()


def _ratio(stored: Tensor, exact: Tensor) -> float:
    return ((stored - exact).norm() / exact.norm()).item()
