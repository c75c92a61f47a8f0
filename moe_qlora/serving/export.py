"""Write an adapter in a server's layout, by the table `servers.json`.

"fused" is PEFT's layout, LoRA on fused expert weights; "single" has a pair for each projection of
each expert. Each server's layouts were tested with the version that the table gives.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..checkpoint.adapter import CONFIG, PREFIX, WEIGHTS, Adapter, Updates, open_adapter
from ..checkpoint.conversion import Base, open_base
from ..checkpoint.folder import absolute, check_new, inside, new_folder
from ..checkpoint.training_codec import CARD, NOTE, check_noted_base
from ..detection.detect import detect
from ..errors import AdapterError, ConfigError
from ..layout import ExpertParam, listed, name_pattern
from ..models.files import read_json

MERGE = "merge the adapter with moe-qlora merge and serve the merged folder"
Pair = tuple[Tensor, Tensor]  # factors of a weight: a (E, r, in), b (E, out, r)


@dataclass(frozen=True)
class ExportReport:
    """The result of an export."""

    folder: Path
    server: str
    tested: str  # server version of the test
    fused: bool
    tensors: int
    rank: int
    notes: tuple[str, ...] = ()
    loader_only: bool = False  # only the server's loader was tested, not its engine

    def __str__(self) -> str:
        layout = "PEFT's layout of fused experts" if self.fused else "one pair for each expert"
        notes = "".join(f"\n  {note}" for note in self.notes)
        seen = f"as {self.server} {self.tested} takes it"
        if self.loader_only:
            seen = f"as the loader of {self.server} {self.tested} stacks it; its engine was not run"
        return f"{self.folder}: {self.tensors} tensors, rank {self.rank}, {layout}, {seen}.{notes}"


@dataclass(frozen=True)
class ServerLayout:
    """A server's layout of adapters for one architecture."""

    server: str
    tested: str  # server version of the test
    fused: bool = False  # PEFT's layout; otherwise a pair for each projection of each expert
    leaves: Sequence[str] = ()  # for single experts: names of gate, up and down projections
    together: Sequence[Sequence[str]] = ()  # layers that need LoRA together
    # parts of names of layers outside the experts: tested, and known not to be served
    layers: Sequence[str] = ()
    unserved: Sequence[str] = ()
    loader_only: bool = False  # only the server's loader was tested, not its engine

    def __str__(self) -> str:
        return f"{self.server} {self.tested}"


def export_adapter(
    adapter: str | Path,
    out: str | Path,
    *,
    base: str | Path,
    target: str,
    any_base: bool = False,
    trust_remote_code: bool = False,
) -> ExportReport:
    """Write an adapter in a server's layout for its architecture.

    The products B A do not change: factors are split, joined and padded with zeros. If the server
    has one scaling only and the adapter several, B is multiplied by the quotient, in float32.

    Args:
        adapter: The folder, in PEFT's layout.
        out: The new folder; must not exist, or be empty. It appears whole or not at all.
        base: The folder of the model that the adapter was trained on, of any kind; names, shapes
            and a sample of weights are read.
        target: The server: "vllm", "sglang", "gguf" (the folder that llama.cpp's
            convert_lora_to_gguf.py takes), or "peft".
        any_base: True takes a base that is not the model in the adapter's note.
        trust_remote_code: Run model code that the base brings.

    Raises a `CheckpointError` where a folder is missing or damaged, or `out` is not empty; an
    `AdapterError` where the adapter does not fit the base, or the server cannot serve it; a
    `ConfigError` for a server that is unknown, or was not tested with this architecture.
    """
    source, folder, place = absolute(base), absolute(adapter), absolute(out)
    check_new(place)
    with ExitStack() as stack:
        opened = stack.enter_context(closing(open_base(source, None, trust_remote_code)))
        named = read_json(source / "config.json").get("architectures")
        named = named if isinstance(named, list) and named else [type(opened.model).__name__]
        layout = layout_for(target, named[0])
        if not any_base:
            check_noted_base(folder, opened.model, str(base), opened.first_rows)
        lora = open_adapter(folder)
        stack.enter_context(lora.file)
        updates = Updates(opened.model, lora)
        work = stack.enter_context(new_folder(place))
        copied, count, rank, notes = [NOTE, CARD], len(lora.file), lora.settings.r, list[str]()
        if target == "peft":
            copied += [CONFIG, WEIGHTS]
        else:
            export = _Export(folder, opened, lora, layout, updates)
            rank, notes = export.write(work), export.notes
            count = len(export.tensors)
        for name in copied:
            if (folder / name).is_file():
                shutil.copyfile(inside(folder, name), work / name)
    return ExportReport(
        place, target, layout.tested, layout.fused, count, rank, tuple(notes), layout.loader_only
    )


class _Export:
    def __init__(
        self, source: Path, base: Base, adapter: Adapter, layout: ServerLayout, updates: Updates
    ) -> None:
        self.source, self.base, self.adapter, self.layout = source, base, adapter, layout
        self.deltas, self.replacements = updates.deltas, updates.replacements
        self.tensors: dict[str, Tensor] = {}
        self.notes: list[str] = []

    def write(self, work: Path) -> int:
        """Write the adapter's files; return its rank."""
        layout, deltas = self.layout, self.deltas
        self._check_served()
        factors, rank, scaling = self._factors()
        layers = [name for name in factors if not deltas[name][0].experts]
        names = {name.removesuffix(".weight") for name in layers}
        untried = {name_pattern(one) for one in names if not {*layout.layers} & {*one.split(".")}}
        if untried:
            self.notes.append(f"not tried: LoRA on {listed(sorted(untried))}")
        for name in layers:
            self._put(self._served(name), *(half[0] for half in factors[name]))
        experts = {name: one for name, one in factors.items() if deltas[name][0].experts}
        fused = self._put_experts(experts, rank)
        self._complete()
        targets = list(map(self._served, layers))
        if not layout.fused:
            targets = [key.split(".lora_")[0].rpartition(".")[2] for key in self.tensors]
        alpha = scaling * rank  # such that alpha / rank is the scaling, bit for bit
        near = (alpha, math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf))
        alpha = next((one for one in near if one / rank == scaling), alpha)
        config = read_json(self.adapter.folder / CONFIG)
        config.update(
            r=rank, lora_alpha=int(alpha) if alpha.is_integer() else alpha, use_rslora=False,
            inference_mode=True, rank_pattern={}, alpha_pattern={},
            target_parameters=sorted(fused) or None, target_modules=sorted({*targets}),
        )  # fmt: skip
        if config.get("exclude_modules"):
            # layers without a pair in the file that the names of leaves would match
            written = {key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in self.tensors}
            ends = {leaf.rpartition(".")[2] for leaf in config["target_modules"]}
            config["exclude_modules"] = [
                name
                for name, _ in self.base.model.named_modules()
                if name.rpartition(".")[2] in ends and self._served(f"{name}.weight") not in written
            ] or None
        save_file(self.tensors, work / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (work / CONFIG).write_text(text, encoding="utf-8")
        return rank

    def _check_served(self) -> None:
        why = dict.fromkeys(self.replacements, "is trained in full (modules_to_save)")
        for name, deltas in self.deltas.items():
            module = self.base.model.get_submodule(name.rpartition(".")[0])
            if any(delta.tokens for delta in deltas) or len(deltas) > 1:
                why[name] = "has trained rows of tokens, or two changes"
            elif isinstance(module, nn.Embedding):
                why[name] = "is an embedding, and was not seen to be served"
            elif {*self.layout.unserved} & {*name.split(".")}:
                why[name] = "is not served from an adapter of this architecture"
        for name, reason in why.items():
            raise AdapterError(
                f"{self.source} changes {name}, which {reason}, so that {self.layout} cannot take "
                f"it from an adapter: {MERGE}."
            )

    def _factors(self) -> tuple[dict[str, Pair], int, float]:
        """Return factors by name, with E = 1 outside of experts; their one rank and scaling."""
        file, deltas = self.adapter.file, {n: one for n, (one,) in self.deltas.items()}
        ranks = {name: file.info(one.b).shape[1] for name, one in deltas.items()}
        ranks = {name: own // max(deltas[name].experts, 1) for name, own in ranks.items()}
        pairs = [(ranks[name], one.scaling) for name, one in deltas.items()]
        _, scaling = max(sorted(set(pairs)), key=pairs.count)  # of most weights
        least, rank = min(pairs)[0], max(pairs)[0]
        if least < rank:
            self.notes.append(f"ranks from {least} to {rank} are padded to {rank} with zeros")
        if folded := sum(own != scaling for _, own in pairs):
            self.notes.append(f"the scaling of {folded} weights is folded into B, in float32")
        factors = {}
        for name, delta in deltas.items():
            a = file.read(delta.a).unflatten(0, (max(delta.experts, 1), -1))
            b = file.read(delta.b).unflatten(1, (-1, len(a))).permute(2, 0, 1)
            if delta.scaling != scaling:
                b = b.float() * (delta.scaling / scaling)
            pad, widen = rank - ranks[name], nn.functional.pad
            factors[name] = widen(a, (0, 0, 0, pad)), widen(b, (0, pad))
        return factors, rank, scaling

    def _served(self, name: str) -> str:
        """Return the path of a layer in the checkpoint, which servers use."""
        group = self.base.layout.by_name.get(name)
        key = group.keys[0] if group is not None and len(group.keys) == 1 else name
        return key.removesuffix(".weight")

    def _put(self, path: str, a: Tensor, b: Tensor) -> None:
        self.tensors[f"{PREFIX}{path}.lora_A.weight"] = a.clone().contiguous()
        self.tensors[f"{PREFIX}{path}.lora_B.weight"] = b.contiguous()

    def _put_experts(self, experts: Mapping[str, Pair], rank: int) -> set[str]:
        """Write the experts' factors; return the names of the fused weights."""
        modules: dict[str, dict[str, ExpertParam]] = {}
        for param in detect(self.base.model):
            modules.setdefault(param.module_name, {})[param.role] = param
        names: set[str] = set()
        for module in sorted({name.rpartition(".")[0] for name in experts}):
            dtype = next(a.dtype for name, (a, _) in experts.items() if name.startswith(module))
            pairs = {}
            for role, param in modules[module].items():
                if (known := experts.get(param.name)) is None:
                    count, rows, columns = param.num_experts, param.out_features, param.in_features
                    if rows is None or columns is None:
                        raise AdapterError(
                            f"{param.name} has no orientation that could be found "
                            f"({param.orientation_evidence}): {MERGE}."
                        )
                    a = torch.zeros(count, rank, columns, dtype=dtype)
                    known = a, a.new_zeros(count, rows, rank)
                pairs[role] = known
            if not self.layout.fused:
                self._put_single(module, pairs)
                continue
            for depth, (a, b) in enumerate(reversed(pairs.values())):
                halves = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)  # (E r, in), (out, r E)
                self._put(module + ".base_layer" * depth, *halves)
            names |= {param.name for param in modules[module].values()}
        return names

    def _put_single(self, module: str, pairs: dict[str, Pair]) -> None:
        if "gate_up" in pairs:
            a, b = pairs.pop("gate_up")
            # rows of gate and up may alternate: a change of the second moves the first output
            gate_of = getattr(self.base.model.get_submodule(module), "_apply_gate", None)
            probe = torch.linspace(0.5, 1.5, 8).unsqueeze(0)
            moved = probe.index_add(1, torch.tensor([1]), torch.full((1, 1), 0.25))
            with torch.no_grad():
                alternate = gate_of and bool((gate_of(probe) != gate_of(moved))[0, 0])
            gate, up = (b[:, ::2], b[:, 1::2]) if alternate else b.chunk(2, dim=1)
            pairs |= {"gate": (a, gate), "up": (a, up)}
        leaves = dict(zip(("gate", "up", "down"), self.layout.leaves, strict=True))
        if unknown := sorted(pairs.keys() - leaves.keys()):
            raise AdapterError(
                f"{module} has expert weights of the role {unknown[0]!r}, which {self.layout} has "
                f"no name for: {MERGE}."
            )
        path = module  # of the experts on disk
        for name, group in self.base.layout.by_name.items():
            if name.startswith(f"{module}.") and ".experts." in group.keys[0]:
                path = f"{group.keys[0].partition('.experts.')[0]}.experts"
                break
        for role, pair in pairs.items():
            for expert, (a, b) in enumerate(zip(*pair, strict=True)):
                self._put(f"{path}.{expert}.{leaves[role]}", a, b)

    def _complete(self) -> None:
        """Add zeros for layers that the server stacks with adapted ones."""
        paths = {key.rpartition(".lora_")[0] for key in self.tensors}
        for names in self.layout.together:
            for path in sorted(path for path in paths if ".experts." not in path):
                parent, _, leaf = path.rpartition(".")
                for other in names if leaf in names else ():
                    missing = f"{parent}.{other}".removeprefix(PREFIX)
                    known = self.base.disk.get(f"{missing}.weight")
                    if known is None or f"{parent}.{other}" in paths:
                        continue
                    a = self.tensors[f"{path}.lora_A.weight"]
                    self._put(missing, torch.zeros_like(a), a.new_zeros(known[0][0], a.shape[0]))
                    paths.add(f"{parent}.{other}")


@cache
def servers() -> dict[str, Any]:
    """Return the table of servers by name."""
    return json.loads(Path(__file__).with_name("servers.json").read_text("utf-8"))


def layout_for(server: str, architecture: str) -> ServerLayout:
    """Return a server's layout for an architecture; raise a ConfigError where there is none."""
    if server not in servers():
        raise ConfigError(f"target is {server!r}; give one of {', '.join(servers())}.")
    entry = dict(servers()[server])
    rows = entry.pop("architectures")
    if (row := rows.get(architecture, rows.get("*"))) is None:
        raise ConfigError(
            f"{server} {entry['tested']} was not seen to serve LoRA on the experts of "
            f"{architecture} (it was for {', '.join(rows)}): {MERGE}."
        )
    layers = (*entry.pop("layers", ()), *row.get("layers", ()))
    return ServerLayout(server, **{**entry, **row, "layers": layers})
