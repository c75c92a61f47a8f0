"""Run random sequences of public calls on tiny models, and hold each against an oracle.

    python tools/fuzz_calls.py --minutes 60              as many sequences as an hour holds
    python tools/fuzz_calls.py --sequences 2000 --first 7
    python tools/fuzz_calls.py --seed 31                 one sequence once more, as a program
    python tools/fuzz_calls.py --refusals                what may be refused, and why

A sequence draws a family, a quantization and a way to load, and then 8 to 18 calls: adapters made,
trained, weighted, merged, saved, loaded, exported; models copied, packed, saved, verified. After
each call, logits are compared with `fuzz_oracle.Oracle`, which keeps plain weights and factors of
its own. A call may be refused only where a row of `ALLOWED` says so, must be refused there, and
leaves the model as it was. A sequence that contradicts the oracle is printed as a program.

Exit code 1 where a sequence failed. One takes some three seconds.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from tools import fuzz_oracle
from tools.fuzz_machine import (
    ALLOWED,
    EXPERTS,
    OUTSIDE_THE_INTERFACE,
    Machine,
    Tally,
    call,
    forward,
)
from tools.fuzz_oracle import Adapter, Contradiction

# --- adapters -----------------------------------------------------------------------------------


def draw_lora(m: Machine) -> tuple[str, str, Adapter, list[str]]:
    """Draw settings; return the config, the options, the adapter without factors, its names."""
    rng = m.rng
    rank, alpha, root = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 4, 7, 16]), rng.random() < 0.3
    leaves = sorted({n.split(".")[-2] for n in m.linears if n not in m.routers})
    part = rng.choice(["some", "some", "all-linear", "none"])
    some = rng.sample(leaves, min(len(leaves), rng.randint(1, 3)))
    targets = {"some": repr(some), "all-linear": "'all-linear'", "none": "[]"}[part]
    names = [
        n for n in m.linears
        if n not in m.routers and part != "none" and (part != "some" or n.split(".")[-2] in some)
    ]  # fmt: skip
    options, chosen = [], {}
    way = rng.choice(["all", "all", "down", "chosen", "no"] if part != "none" else ["all"])
    down = [n for n in m.experts if n.endswith("down_proj")]
    if way == "down" and down:
        options.append("experts=['down']")
        names += down
    elif way == "chosen" and m.family not in OUTSIDE_THE_INTERFACE:
        modules = sorted({n.rpartition(".")[0] for n in m.experts})
        module = rng.choice(modules)
        indices = sorted(rng.sample(range(EXPERTS), rng.randint(1, EXPERTS - 1)))
        options.append(f"experts={{{module!r}: {indices}}}")
        mine = [n for n in m.experts if n.rpartition(".")[0] == module]
        names += mine
        chosen = dict.fromkeys(mine, indices)
    elif way != "no":
        options.append("experts=True")
        names += m.experts
    if rng.random() < 0.3:
        options.append("router=True")
        names += m.routers
    config = f"LoraConfig(r={rank}, lora_alpha={alpha}, target_modules={targets}"
    config += ", use_rslora=True)" if root else ")"
    scaling = alpha / (rank**0.5 if root else rank)
    return config, ", ".join(options), Adapter({}, scaling, chosen), names


def take_factors(m: Machine, name: str, adapter: Adapter, names: list[str]) -> None:
    """Fill a new adapter, and note its factors, which must be on these weights."""
    m.run(f"fill(model, {name!r}, {m.rng.randrange(1000)})")
    adapter.factors = fuzz_oracle.read_factors(m.model, name)
    if set(adapter.factors) != set(names):
        more, less = set(adapter.factors) - set(names), set(names) - set(adapter.factors)
        raise Contradiction(f"LoRA is on {sorted(more)} too, and not on {sorted(less)}")
    m.oracle.adapters[name] = adapter


@call("packed", "peft", "plain")
def get_peft_model(m: Machine) -> Any:
    config, options, adapter, names = draw_lora(m)
    said = f"config, {options}" if options else "config"
    odd = m.rng.random()
    if m.stage != "packed":
        if odd < 0.7:
            return False
        why = "a second time" if m.stage == "peft" else "LoRA on packed experts that are none"
        code = f"moe_qlora.get_peft_model(model, {config}, experts=True)"
        return m.run(code, f"get_peft_model: {why}") or True
    if odd < 0.1 and m.experts:
        code = config[:-1] + ", use_dora=True)"
        code = f"moe_qlora.get_peft_model(model, {code}, experts=True)"
        return m.run(code, "get_peft_model: DoRA on packed experts") or True
    if odd < 0.2 and m.family in OUTSIDE_THE_INTERFACE:
        code = config[:-1] + ", lora_dropout=0.1)"
        code = f"moe_qlora.get_peft_model(model, {code}, experts=True)"
        why = "get_peft_model: dropout where the forward reads the weight itself"
        return m.run(code, why) or True
    name = m.rng.choice(["default", "first"])
    said = f"model, {config}" + (f", {options}" if options else "")
    m.run(f"model = moe_qlora.get_peft_model({said}, adapter_name={name!r})")
    take_factors(m, name, adapter, names)
    m.oracle.active, m.stage = [name], "peft"
    return None


@call("peft")
def add_adapter(m: Machine) -> Any:
    if len(m.oracle.adapters) > 3:
        return False
    config, options, adapter, names = draw_lora(m)
    name = m.fresh("a")
    said = f"model, {config}" + (f", {options}" if options else "")
    code = f"model.add_adapter({name!r}, moe_qlora.adapt_lora_config({said}))"
    if m.run(code, other_parameters(m, names)):
        take_factors(m, name, adapter, names)
    return None


def other_parameters(m: Machine, names: Iterable[str]) -> str | None:
    """Return the refusal of a further adapter on these weights, if PEFT has one."""
    mine = m.parameters(names)
    others = [m.parameters(adapter.factors) for adapter in m.oracle.adapters.values()]
    if mine and any(other and other != mine for other in others):
        return "add_adapter: on other parameters than another adapter"
    return None


@call("peft")
def set_adapter(m: Machine) -> None:
    names = list(m.oracle.adapters)
    if m.rng.random() < 0.3 and len(names) > 1:
        active = m.rng.sample(names, 2)
        m.run(f"model.base_model.set_adapter({active})")
    else:
        active = [m.rng.choice(names)]
        m.run(f"model.set_adapter({active[0]!r})")
    m.oracle.active, m.merged = active, False  # PEFT unmerges what was merged


@call("peft")
def disable_adapter(m: Machine) -> None:
    m.run("with model.disable_adapter():\n    logits = forward(model, inputs)")
    fuzz_oracle.check_close("disabled", m.names["logits"], m.oracle.logits([]))


@call("peft")
def delete_adapter(m: Machine) -> Any:
    names = list(m.oracle.adapters)
    if len(names) < 2:
        return False
    gone = m.rng.choice(names)
    m.run(f"model.delete_adapter({gone!r})")
    del m.oracle.adapters[gone]
    stay = [name for name in m.oracle.active if name != gone]
    if stay != m.oracle.active:  # each layer goes on with one of its own
        stay = stay[:1] or [next(iter(m.oracle.adapters))]
        m.run(f"model.set_adapter({stay[0]!r})")
        m.oracle.active = stay
    return None


@call("peft")
def add_weighted_adapter(m: Machine) -> Any:
    adapters = m.oracle.adapters
    if len(adapters) > 4:
        return False
    of = m.rng.sample(list(adapters), min(len(adapters), m.rng.randint(1, 3)))
    way, name, refusal = m.rng.choice(["cat", "linear", "svd"]), m.fresh("w"), None
    weights = [m.rng.choice([0.5, 1.0, 0.3, 2.0]) for _ in of]
    ranks = [int(m.model.peft_config[adapter].r) for adapter in of]
    if m.rng.random() < 0.1:
        of, weights, ranks = [*of, "nobody"], [*weights, 1.0], [*ranks, 1]
        refusal = "add_weighted_adapter: of an adapter that is not there"
    if any(a in adapters and adapters[a].trained for a in of):
        refusal = "add_weighted_adapter: of chosen experts"
    elif refusal is None and way == "linear" and len(set(ranks)) > 1:
        refusal = "add_weighted_adapter: linear, of two ranks"
    if any(name in weight.split(".") for weight in m.oracle.base):
        refusal = "add_weighted_adapter: the name of a layer"
    code = f"model.add_weighted_adapter({of}, {weights}, {name!r}, combination_type={way!r})"
    if not m.run(code, refusal):
        return None
    mine = Adapter(fuzz_oracle.read_factors(m.model, name), 1.0)
    wanted = m.oracle.weighted(of, weights, way, max(ranks))
    if set(wanted) != set(mine.factors):
        raise Contradiction(f"the sum is on {len(mine.factors)} weights, not on {len(wanted)}")
    m.oracle.adapters[name] = mine
    for weight, delta in m.oracle.effect(name).items():
        fuzz_oracle.check_close(f"{way} of {weight}", delta, wanted[weight], 1e-3)
    return None


# --- merging ------------------------------------------------------------------------------------


@call("peft")
def merge_adapter(m: Machine) -> None:
    refusal = "merge_adapter: of experts in host memory" if m.hosted else None
    m.merged = m.run("model.merge_adapter(dtype=torch.float32)", refusal)


@call("peft")
def unmerge_adapter(m: Machine) -> Any:
    if not m.merged:
        return False
    m.run("model.unmerge_adapter()")
    m.merged = False
    return None


@call("peft")
def merge_and_unload(m: Machine) -> Any:
    if m.rng.random() < 0.6:  # it ends what else could be tried
        return False
    refusal = "merge_and_unload: of experts in host memory" if m.hosted else None
    if not m.run("model = model.merge_and_unload(dtype=torch.float32)", refusal):
        return None
    m.oracle.base = m.oracle.weights(m.oracle.active)
    m.oracle.adapters, m.oracle.active, m.stage, m.pristine = {}, [], "plain", False
    m.saved.clear()
    return None


# --- training -----------------------------------------------------------------------------------


@call("peft")
def train(m: Machine) -> Any:
    active, lr = m.oracle.active, m.rng.choice([0.1, 0.3])
    wanted = m.oracle.gradients(active)
    m.run(f"model.base_model.set_adapter({active})\nmodel.train()")  # trainable, as loaded too
    m.run(f"grads = step(model, inputs, {lr})")
    seen = {adapter: fuzz_oracle.read_factors(m.model, adapter) for adapter in active}
    rounding: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
    for (adapter, name), grads in wanted.items():
        pair = m.oracle.adapters[adapter].factors[name]
        largest = max(float(g.abs().max()) for g in grads)
        for i, (new, old, grad) in enumerate(zip(seen[adapter][name], pair, grads, strict=True)):
            off = float((old - new).sub(lr * grad).abs().max())
            allowed = lr * largest * 2e-3 + 2e-6
            if off <= allowed:
                continue
            rounding = rounding or m.oracle.rounding(active, wanted)
            if not off <= allowed + lr * 4 * float(rounding[adapter, name][i].abs().max()):
                message = f"the step of lora_{'AB'[i]} of {name} is not the gradient's"
                raise Contradiction(message)
    for adapter in active:
        m.oracle.adapters[adapter].factors = seen[adapter]
    return None


@call("peft")
def gradient_checkpointing(m: Machine) -> None:
    kwargs = f"gradient_checkpointing_kwargs={{'use_reentrant': {m.rng.random() < 0.5}}}"
    on = f"model.enable_input_require_grads()\nmodel.gradient_checkpointing_enable({kwargs})"
    if m.family == "jetmoe":
        m.run("model.gradient_checkpointing_enable()", "gradient_checkpointing: of JetMoe")
    else:
        m.run(m.rng.choice([on, "model.gradient_checkpointing_disable()"]))


@call("packed", "peft", "plain")
def train_mode(m: Machine) -> None:
    m.run(m.rng.choice(["model.train()", "model.eval()"]))


@call("packed", "peft", "plain")
def evaluate(m: Machine) -> None:
    m.run("model.eval()\nlogits = forward(model, inputs, exact=False)")
    fuzz_oracle.check_loosely("without gradients", m.names["logits"], m.oracle.logits())


@call("packed", "peft", "plain")
def deepcopy(m: Machine) -> None:
    m.run("before, model = model, copy.deepcopy(model)")
    if m.stage == "peft" and not m.merged:  # the copy shares nothing
        m.run(f"fill(before, {m.oracle.active[0]!r}, 5)")
    m.run("del before")
    m.hosted = False


@call("packed", "peft")
def offload_experts(m: Machine) -> None:
    """Move experts to host memory, or back."""
    if m.hosted:
        m.run("off.remove()")
    else:
        m.run(f"off = moe_qlora.offload_experts(model{m.rng.choice(['', ', layers=1'])})")
    m.hosted = not m.hosted


# --- folders ------------------------------------------------------------------------------------


@call("peft")
def save_adapter(m: Machine) -> None:
    name = m.rng.choice(list(m.oracle.adapters))
    stem = m.fresh("adapter")
    m.run(f"model.save_pretrained(place / {stem!r}, selected_adapters=[{name!r}])")
    folder = f"place / {stem!r}" + ("" if name == "default" else f" / {name!r}")
    mine = m.oracle.adapters[name]
    parameters: dict[str, list[str]] = {}
    for weight in m.oracle.base:
        if weight in mine.factors and weight in (*m.experts, *m.routers):
            path, _, leaf = weight.rpartition(".")
            parameters.setdefault(path, []).append(leaf)
    found = fuzz_oracle.read_file(eval(folder, m.names), parameters)
    if set(found) != set(mine.factors):
        others = sorted(set(found) ^ set(mine.factors))
        raise Contradiction(f"{stem} has LoRA on {others}, or lacks it there")
    for weight, pair in mine.factors.items():
        for got, wanted in zip(found[weight], pair, strict=True):
            if not torch.equal(got, wanted):
                raise Contradiction(f"{stem}: factors of {weight} are others")
    m.saved.append((folder, Adapter(dict(mine.factors), mine.scaling, dict(mine.trained))))


@call("packed", "peft")
def load_adapter(m: Machine) -> Any:
    if not m.saved or len(m.oracle.adapters) > 4:
        return False
    folder, adapter = m.rng.choice(m.saved)
    if m.stage == "peft" and m.rng.random() < 0.15:
        code = f"moe_qlora.load_adapter(model, {folder}, {m.oracle.active[0]!r})"
        return m.run(code, "load_adapter: a name that is taken") or True
    name = m.fresh("l")
    ways = [f"moe_qlora.load_adapter(model, {folder}, {name!r}, is_trainable=True)"]
    if m.stage == "peft":
        ways.append(f"model.load_adapter({folder}, {name!r}, is_trainable=True)")
    else:
        ways.append(f"PeftModel.from_pretrained(model, {folder}, {name!r}, is_trainable=True)")
    code = m.rng.choice(ways)
    mine = adapter.loaded_by(code)
    code = code if code.startswith("model.") else f"model = {code}"
    if not m.run(code, other_parameters(m, mine.factors)):
        return None
    m.oracle.adapters[name] = mine
    m.run(f"model.set_adapter({name!r})")
    m.oracle.active, m.stage = [name], "peft"
    return None


@call("peft")
def load_anew(m: Machine) -> Any:
    """Load the model once more as at the start, and a saved adapter into it."""
    if not m.saved or not m.pristine:
        return False
    folder, adapter = m.rng.choice(m.saved)
    m.run("del model")
    m.begin_anew()
    way = m.rng.choice(["moe_qlora.load_adapter", "PeftModel.from_pretrained"])
    m.run(f"model = {way}(model, {folder}, 'default', is_trainable=True)")
    m.oracle.adapters = {"default": adapter.loaded_by(way)}
    m.oracle.active = ["default"]
    return None


@call("peft")
def merge_folders(m: Machine) -> Any:
    """Merge a saved adapter into the folder that was loaded; the result is a stock model."""
    if not m.saved or not m.pristine or m.way == "keep_codes":
        return False
    folder, adapter = m.rng.choice(m.saved)
    packed = m.way == "quantize_checkpoint" and m.rng.random() < 0.5
    source, out = ("place / 'packed'" if packed else "folder"), m.fresh("merged")
    m.run(f"moe_qlora.merge_adapter({source}, {folder}, place / {out!r}, dtype=torch.float32)")
    m.run(
        f"other = cls.from_pretrained(place / {out!r}, dtype=torch.float32, "
        "experts_implementation='eager')"
    )
    m.oracle.adapters["/"] = adapter
    # The packed folder's weights are decoded to bf16, as they were before.
    base = {n: w.bfloat16().float() for n, w in m.oracle.base.items()}
    wanted = m.oracle.logits(["/"], base if packed else m.oracle.original)
    del m.oracle.adapters["/"]
    tolerance = 4e-3 if packed else fuzz_oracle.TOLERANCE  # of ties that bitsandbytes rounds up
    logits = forward(m.names["other"], m.oracle.inputs)
    fuzz_oracle.check_close("merged folder", logits, wanted, tolerance)
    return None


@call("peft")
def export_adapter(m: Machine) -> Any:
    """Export a saved adapter in PEFT's layout, and load it back."""
    if not m.saved or not m.pristine:
        return False
    folder, adapter = m.rng.choice(m.saved)
    out = m.fresh("export")
    if m.rng.random() < 0.2:
        code = f"moe_qlora.export_adapter({folder}, place / {out!r}, base=folder, target='nobody')"
        return m.run(code, "export_adapter: to a server that is not known") or True
    base = "place / 'packed'" if m.way == "quantize_checkpoint" else "folder"
    m.run(
        f"moe_qlora.export_adapter({folder}, place / {out!r}, base={base}, target='peft')\n"
        f"other, held = model, off\n{m.begin}\nmodel, other, off = other, model, held\n"
        f"other = moe_qlora.load_adapter(other, place / {out!r})"
    )
    m.oracle.adapters["/"] = adapter
    wanted = m.oracle.logits(["/"])
    del m.oracle.adapters["/"]
    m.check("exported adapter", m.names["other"], wanted)
    return None


@call("packed")
def save_packed(m: Machine) -> None:
    out = m.fresh("saved")
    m.run(f"model.save_pretrained(place / {out!r})\nassert verify(place / {out!r}).good")
    m.begin_with("", f"model = cls.from_pretrained(place / {out!r})", files=True)
    m.begin_anew()


@call("packed")
def quantize_again(m: Machine) -> None:
    m.run("moe_qlora.quantize_experts(model, config)")


@call("plain")
def save_plain(m: Machine) -> None:
    out = m.fresh("plain")
    m.run(
        f"model.save_pretrained(place / {out!r})\n"
        f"model = cls.from_pretrained(place / {out!r}, dtype=torch.float32)"
    )


@call("plain")
def quantize_plain(m: Machine) -> None:
    """Pack a merged model again."""
    m.run("moe_qlora.quantize_experts(model, config)")
    m.stage, m.way = "packed", "quantize_experts"
    m.read_base()


# --- the runs -----------------------------------------------------------------------------------


def main() -> int:
    """Run the sequences that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, help="begin no sequence after these")
    parser.add_argument("--sequences", type=int, help="at most so many; 100 without --minutes")
    parser.add_argument("--first", type=int, default=0, help="the first sequence's seed")
    parser.add_argument("--seed", type=int, help="run this one and print its program")
    parser.add_argument("--refusals", action="store_true", help="list what may be refused")
    options = parser.parse_args()
    if options.refusals:
        for condition, (kind, sentence, reason) in ALLOWED.items():
            print(f"{condition}\n    {kind}: ...{sentence}...\n    {reason}")
        return 0
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    disable_progress_bar()
    torch.set_num_threads(1)
    count = options.sequences or (sys.maxsize if options.minutes else 100)
    first, count = (options.first, count) if options.seed is None else (options.seed, 1)
    end = time.monotonic() + 60 * (options.minutes or 1e6)
    tally = Tally()
    print(f"sequences from seed {first}", flush=True)
    with tempfile.TemporaryDirectory() as sources:
        for seed in range(first, first + count):
            if time.monotonic() > end:
                break
            program = tally.run(seed, Path(sources), print)
            if options.seed is not None:
                print(program)
    print(tally)
    return int(bool(tally.failed))


if __name__ == "__main__":
    sys.exit(main())
