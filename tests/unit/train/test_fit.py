"""`fit_memory`: what layers keep, where experts lie, what that takes, how it is undone."""

import copy
import logging
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import moe_qlora
from moe_qlora.distributed import ranks
from moe_qlora.errors import ConfigError
from moe_qlora.integrations.host import loss_of
from moe_qlora.planning import choice, levels
from moe_qlora.planning.choice import LEVELS
from moe_qlora.planning.devices import Pace
from moe_qlora.testing import tiny_model
from moe_qlora.train.fit import Fit
from moe_qlora.train.layers import LayerRunner, runner_of, used_arguments
from tests.helpers import training
from tests.helpers.fitting import (
    BATCH,
    SEQ,
    adapted,
    fitted,
    least_memory,
    measured_peak,
    token_ids,
    train,
    with_lora,
)
from tests.helpers.graphed import packed, recorded
from tests.helpers.ranks import one_of_ranks, sharded
from tests.helpers.small_models import fill
from tests.helpers.training import assert_same, assert_same_training, whole_gradients


def nested(seen: list[Any]) -> bool:
    """Whether no layer keeps less in a later choice."""
    values = torch.tensor(seen, dtype=torch.int)
    return bool((values[1:] >= values[:-1]).all())


def levels_of(fit: Any) -> list[int]:
    return [LEVELS.index(layer.activations) for layer in fit.layers]


# Eager attention with two kinds of masks, a dense layer first, gated delta nets, a norm behind
OTHERS = ("gpt_oss", "deepseek_v3", "qwen3_next", "afmoe", "gemma4_text")


@pytest.mark.parametrize(
    ("model_type", "seq"),
    [
        ("qwen3_moe", SEQ),
        *(pytest.param(each, SEQ, marks=pytest.mark.nightly) for each in OTHERS),
        ("gpt_oss", 200_000),
    ],
)
def test_no_memory_is_exceeded_and_nothing_else_changes(model_type, seq, monkeypatch):
    if seq > SEQ:  # On the levels of long sequences
        monkeypatch.setattr(choice, "_LONG", 1)
    model = adapted(model_type, **{"num_hidden_layers": 3} if model_type == "qwen3_moe" else {})
    ids = token_ids(model)
    weights = copy.deepcopy(model.state_dict())
    before = train(model, ids)
    least = least_memory(model)
    with fitted(model) as fit:
        most = fit.peak
    seen = []
    for memory in (least, (least + most) // 2, most):
        model.load_state_dict(weights)
        with fitted(model, memory) as fit:
            assert fit.memory == memory
            # Which experts tokens choose is not known before: at worst all the same.
            measured = measured_peak(model, torch.zeros_like(ids))
            # Masks of eager attention, which layers that keep all need no more, are planned.
            assert measured <= fit.peak <= min(1.04 * measured, memory)
            assert_same_training(train(model, ids), before)
            seen.append(levels_of(fit))
    assert nested(seen)
    assert seen[-1] == [len(LEVELS) - 1] * len(seen[0])


def test_losses_that_are_not_the_models():
    """A reference runs without gradients."""
    model, loss = adapted(num_hidden_layers=3, vocab_size=2048), loss_of("dpo")
    ids, least = token_ids(model), least_memory(model, loss=loss)
    with fitted(model, loss=loss) as fit:
        most = fit.peak
        assert {layer.activations for layer in fit.layers} == {"keep"}
    with fitted(model) as fit:
        assert most != fit.peak
    for memory in (least, (least + most) // 2):
        with fitted(model, memory, loss=loss) as fit:
            # The ids are counted as soon as an operator returns a view of them.
            measured = measured_peak(model, ids, loss_of=loss) - ids.nbytes
            assert measured <= fit.peak <= min(memory, 1.03 * measured)


def test_what_is_gathered_for_a_layer_is_not_what_it_keeps_or_works_with(monkeypatch):
    """As FSDP2 gathers: before a layer's forward, and freed after it."""
    model, nbytes = adapted(num_hidden_layers=4), 1 << 24

    def measured() -> list[Any]:
        with fitted(model) as fit:
            return [each for each in fit._measure(levels.RECOMPUTE) if "layers" in each.name]

    expected = [(a.saved, a.forward, nbytes) for a in measured()]
    del model.equal_models  # Whose measured step is used again
    gathered: dict[nn.Module, Tensor] = {}

    def gather(layer: nn.Module, _: Any) -> None:
        gathered[layer] = torch.empty(nbytes, dtype=torch.uint8)

    def free(layer: nn.Module, *_: Any) -> None:
        del gathered[layer]

    layers = [*model.get_base_model().model.layers]
    for layer in layers:
        layer.register_forward_pre_hook(gather)
        layer.register_forward_hook(free)
    monkeypatch.setattr(ranks, "gathered_nbytes", lambda module: nbytes * (module in layers))
    assert [(a.saved, a.forward, a.gathered) for a in measured()] == expected


def test_layers_that_text_does_not_reach_are_computed_again():
    """Those of a vision tower: how much they allocate for images is not measured."""
    model = adapted("qwen3_vl_moe")
    ids = token_ids(model)
    expected = train(adapted("qwen3_vl_moe"), ids)
    vision = [m for m in model.modules() if type(m).__name__ == "Qwen3VLMoeVisionBlock"]
    with fitted(model) as fit:
        assert vision and {layer.level for layer in map(runner_of, vision)} == {"recompute"}
        assert {layer.activations for layer in fit.layers} == {"keep"}
        assert all("language_model" in layer.name for layer in fit.layers)
        assert measured_peak(model, ids) <= fit.peak
        assert_same_training(train(model, ids), expected)


def test_experts_in_host_memory_come_to_the_device_as_far_as_they_fit(monkeypatch):
    # The tiny model's computing hides no copies.
    monkeypatch.setattr("moe_qlora.train.fit._pace", lambda device: Pace(link=1.0))
    model = adapted("deepseek_v3", num_hidden_layers=4)  # A dense layer first
    ids, weights = token_ids(model), copy.deepcopy(model.state_dict())
    resident = train(model, ids)
    off = moe_qlora.offload_experts(model)
    layers, host_nbytes, least = off.layers, off.host_nbytes, least_memory(model)
    with fitted(model) as fit:
        most = fit.peak
        assert {(one.activations, one.experts) for one in fit.layers} == {("keep", "device")}
        assert (off.layers, off.host_nbytes, off.slots) == ((), 0, 0)
    seen = []
    for part in range(3):
        memory = least + (most - least) * part // 2
        model.load_state_dict(weights)
        with fitted(model, memory) as fit:
            measured = measured_peak(model, torch.zeros_like(ids))
            assert measured <= fit.peak <= min(memory, 1.03 * measured)
            assert_same_training(train(model, ids), resident)
            where = [layer.experts for layer in fit.layers]
            host = [layer.name for layer in fit.layers if layer.experts == "host"]
            assert [name.removeprefix("base_model.model.") for name in off.layers] == host
            assert where == sorted(where)  # The last ones
            seen.append([*zip(levels_of(fit), (e == "device" for e in where), strict=True)])
            counts = f"experts of {len(host)} lie in "
            assert (counts in str(fit) and "; copies " in str(fit)) or not host
        assert (off.layers, off.host_nbytes) == (layers, host_nbytes)
    assert nested(seen)
    levels, kept = ([sum(each[part] for each in fit) for fit in seen] for part in (0, 1))
    assert kept[0] < len(seen[0]) == kept[1] == kept[2]  # Experts get the memory first
    assert levels[0] < levels[-1]
    fit = fitted(model, least)
    for undo in (off, fit):  # In the other order
        undo.remove()
        model.load_state_dict(weights)
        assert_same_training(train(model, ids), resident)
    assert off.host_nbytes == 0 and not off.layers


def test_where_nothing_fits_offloading_is_named_only_if_it_helps():
    model = adapted(num_hidden_layers=4)

    def said(memory: int) -> str:
        with pytest.raises(ConfigError, match="bytes are missing") as error:
            fitted(model, memory)
        return str(error.value)

    every = least_memory(model)
    with moe_qlora.offload_experts(model):
        least = least_memory(model)
        missing = said(least - 1)
        assert "experts of 4 in host memory takes" in missing and "offload_exp" not in missing
        fitted(model, least).remove()
    with moe_qlora.offload_experts(model, layers=3):
        assert f"would free {least_memory(model) - least} bytes" in said(least)
    for memory in (every - 1, least):
        assert f"{every - memory} bytes are missing" in said(memory)
        assert f"offload_experts(model) would free {every - least} bytes" in said(memory)
    assert "offload_experts" not in said(least - 1)


def half(model: Any) -> int:
    """A memory in which layers keep part of their activations."""
    with fitted(model) as fit:
        most = fit.peak
    return (least_memory(model) + most) // 2


def offloaded_by_fsdp() -> Any:
    """A model whose shards are for a GPU and lie in host memory."""
    model = adapted()
    next(model.parameters()).device_mesh = SimpleNamespace(device_type="cuda")
    return model


NO_LOSS: list[tuple[Any, str]] = [
    (lambda m, b: m(**b).loss + m(**b).loss, r"more than once with gradients.*concatenate"),
    (lambda model, batch: 1.0, "loss returned .*float.*give a function"),
    (lambda model, batch: model(**batch).logits, "loss returned .*shape.*give a function"),
    (lambda model, batch: model(**batch).loss.detach(), "loss returned .*requires_grad=False"),
]
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *((adapted, {"loss": loss}, words) for loss, words in NO_LOSS),
    *((adapted, {"memory": m}, "memory is") for m in (0, "abc", "", True, -5, 1.5, [1], None)),
    *((adapted, {"batch_size": size}, "batch_size is") for size in (0, True, "2", None)),
    (adapted, {"seq_len": -1}, "seq_len is"),
    (adapted, {"memory": "24"}, r"is a number of bytes; write .*24GiB"),
    (adapted, {"memory": 24}, r'\d+ bytes are missing.*write "24GiB"'),
    (adapted, {"loss": "dpo"}, "loss is 'dpo'; give a function"),
    (lambda: nn.Linear(3, 3), {}, "Linear has no decoder layers"),
    (lambda: tiny_model("qwen3_moe", device="meta"), {}, "is on meta"),
    (offloaded_by_fsdp, {}, r"keeps the weights in host memory \(CPUOffloadPolicy\)"),
    (lambda: tiny_model("qwen3_moe").requires_grad_(False), {}, "no weight of the model is train"),
    (lambda: tiny_model("qwen3_omni_moe_talker_text"), {}, "token ids, on which Qwen3OmniMoeT"),
]


def test_what_cannot_be_fitted_is_said():
    for make, how, words in REFUSED:
        model = make()
        with pytest.raises(ConfigError, match=words):
            fitted(model, **how)
        if callable(how.get("loss")):  # Nothing of the measuring is left
            fitted(model).remove()
    model = adapted()
    least = least_memory(model)
    with pytest.raises(ConfigError, match=r"\b1 bytes are missing"):
        fitted(model, least - 1)
    with fitted(model, least), pytest.raises(ConfigError, match=r"call remove\(\)"):
        fitted(model)
    fitted(model).remove()


def everything(model: nn.Module) -> dict[str, Any]:
    """The state that `fit_memory` must not change."""
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    tensors |= {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    tensors["rng"] = torch.get_rng_state()
    found: dict[str, Any] = {name: tensor.tolist() for name, tensor in tensors.items()}
    said = {"_moe_qlora_announcement", "_moe_qlora_adapters_seen"}  # by the first forward
    for name, m in model.named_modules():
        found[f"{name}()"] = {*vars(m)} - said, m.training, vars(m).get("gradient_checkpointing")
    return found | {"trained": [p.requires_grad for p in model.parameters()]}


@pytest.mark.parametrize("end", ["removed", "interrupted"])
def test_the_model_is_as_before(end):
    model = adapted()
    del model.equal_models  # It is measured here
    model.gradient_checkpointing_enable()
    layers = model.get_base_model().model.layers
    model.eval()
    layers[0].train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    before = everything(model)
    if end == "removed":
        with fitted(model, half(model)):
            assert not layers[0].gradient_checkpointing
    else:
        calls = []

        def interrupt(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), layers[-1].register_forward_pre_hook(interrupt):
            fitted(model)
    assert everything(model) == before


@pytest.mark.parametrize(("model_type", "static"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_evaluation_generation_and_tokens_after_a_cached_prefix_run_as_before(model_type, static):
    model = adapted(model_type)
    ids, config = token_ids(model), model.get_base_model().config
    config.use_cache = True

    def results() -> list[Tensor]:
        found = []
        for mode in (False, True):
            model.train(mode)
            with torch.no_grad():
                found.append(model(input_ids=ids).logits)
                assert model(input_ids=ids).past_key_values.get_seq_length() == SEQ
            start = {"input_ids": ids[:, :5], "max_new_tokens": 5, "pad_token_id": 0}
            found.append(model.generate(**start, do_sample=False))
        with model.disable_adapter():
            found.append(model(input_ids=ids).logits)
        for last in (None, -5):
            cache: Any = DynamicCache(config=config)
            if static:
                cache = StaticCache(config=config, max_cache_len=SEQ)
            with torch.no_grad():
                model(input_ids=ids[:, :-6], past_key_values=cache)
            model.zero_grad()
            out = model(input_ids=ids[:, -6:last], past_key_values=cache).logits
            out.square().sum().backward()
            found += [out.detach(), *whole_gradients(model).values()]
        return found

    wanted = results()
    with fitted(model, half(model)):
        assert all(map(torch.equal, results(), wanted))


def test_gradients_are_those_of_computing_all_again():
    """Of two batches and two adapters in autocast; dropout draws the same numbers again."""

    def model() -> Any:
        model = with_lora(adapted().unload(), dropout=0.2)
        model.add_adapter("other", model.peft_config["default"])
        return fill(model, size=0.05)

    def gradients(model: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        for name in ("other", "default"):
            model.set_adapter(name)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                batches = [token_ids(model, seed=seed) for seed in (0, 1)]
                loss = sum(model(input_ids=ids, labels=ids).loss for ids in batches)
            loss.backward()
        return whole_gradients(model)

    checkpointed, ours = model(), model()
    checkpointed.gradient_checkpointing_enable()
    expected = gradients(checkpointed)
    with fitted(ours, half(ours)):
        assert_same(gradients(ours), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
def test_compiled_layers_stay_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model, plain = adapted(num_hidden_layers=1), adapted(num_hidden_layers=1)
    ids = token_ids(model)
    memory = half(model)
    (layer,) = model.get_base_model().model.layers
    layer.compile()
    with fitted(model, memory):
        torch._dynamo.reset()
        counters.clear()
        losses, _ = train(model, ids)
        assert counters["stats"]["unique_graphs"] > 0
    assert losses == pytest.approx(train(plain, ids)[0], rel=1e-5)
    assert layer._compiled_call_impl is not None


def test_what_is_fitted_wins_over_a_trainers_checkpointing(tmp_path):
    def losses(model: Any) -> list[float]:
        options = training.four_steps(tmp_path, 1, use_cpu=True, gradient_checkpointing=True)
        trainer = training.trainer_of(model, options)
        trainer.train()
        return training.logged_losses(trainer)

    expected = losses(adapted(vocab_size=256))
    model = adapted(vocab_size=256)
    layers = model.get_base_model().model.layers
    with fitted(model, batch_size=12, seq_len=8):
        assert losses(model) == expected
        assert not any(layer.gradient_checkpointing for layer in layers)
    assert all(layer.gradient_checkpointing for layer in layers)


def test_recorded_layers_have_room_for_their_pool_and_for_gaps(monkeypatch):
    """By arithmetic alone: the model itself is on a CPU."""
    with fitted(adapted()) as fit:
        activities = fit._activities[levels.RECOMPUTE]
        peak, fit._gaps = fit._needed(activities), 0.04
        assert fit._needed(activities) == int(peak * 1.04)
        monkeypatch.setattr(fit, "_device", torch.device("cuda"))
        record(fit)
        assert fit._needed(activities) > (peak + (256 << 20)) * 1.04
        monkeypatch.undo()


def test_graphs_go_where_a_step_fits_only_without_them(monkeypatch):
    model, own, least = adapted(), Fit._tensors, least_memory(adapted())
    runners = [LayerRunner(layer) for layer in model.get_base_model().model.layers]
    made = SimpleNamespace(remove=lambda: [setattr(each, "graphs", None) for each in runners])
    for runner in runners:
        runner.graphs = made
    monkeypatch.setattr(Fit, "_tensors", lambda fit, a: own(fit, a) + 4 * least * fit._is_recorded)
    for memory, fits in ((9 * least, True), (2 * least, False)):
        with fitted(model, memory) as fit:
            assert fit.graphs_fit is fit._is_recorded is fits
            assert fit._needed(fit._activities[levels.RECOMPUTE]) <= memory


def record(fit: Any) -> None:
    """As if its layers were recorded as graphs."""
    for runner in fit._runners.values():
        runner.graphs = SimpleNamespace(run=lambda runner, *args: runner.compute(*args))


@pytest.mark.parametrize(
    ("over", "reserved", "said"),
    [(1.02, 1.1, None), (1.05, 1.1, "between tensors.*fewer\\)\\."), (1.0, 1.3, "give memory=")],
    ids=["near", "over the plan", "over the memory"],
)
def test_first_steps_that_take_more_than_was_planned_are_said(
    over, reserved, said, monkeypatch, caplog
):
    model = adapted()
    with fitted(model) as fit:
        most = fit.peak
    given: list[None] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int(over * most))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: int(reserved * most))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(None))
    with fitted(model, int(1.2 * most)) as fit:
        record(fit)
        for _ in range(5):
            fit._check_first_steps()
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        for _ in range(2):
            optimizer.step()
        assert len(given) == 1  # Before an optimizer's first step
    found = [text for text in caplog.messages if "the first steps took" in text]
    assert len(found) == (said is not None)
    assert all(re.search(str(said), text) for text in found)


@pytest.mark.parametrize("shape", [(1, BATCH * SEQ), (BATCH + 1, SEQ)])
def test_more_or_longer_sequences_are_computed_again(shape, caplog):
    model = adapted("gpt_oss")
    ids = token_ids(model, *shape)
    expected = train(adapted("gpt_oss"), ids, 1)
    ran: list[int] = []
    layer = model.get_base_model().model.layers[0]
    layer.mlp.router.register_forward_hook(lambda *_: ran.append(1))
    with caplog.at_level(logging.WARNING), fitted(model):
        ran.clear()
        train(model, token_ids(model), 1)
        assert len(ran) == 1 and "were promised" not in caplog.text
    model = adapted("gpt_oss")
    with caplog.at_level(logging.WARNING), fitted(model):
        assert_same_training(train(model, ids, 1), expected)
        assert measured_peak(model, ids) <= least_memory(adapted("gpt_oss"), *shape)
    assert caplog.text.count("were promised") == 1
    assert ("in sequences of 96, and 2 x 48 were" in caplog.text) == (shape[0] == 1)


def test_layers_get_caches_that_hold_tokens_and_no_constants_that_they_hand_on():
    config, ids, full = tiny_model("qwen3_moe").config, torch.ones(1, 4), DynamicCache()
    layer = tiny_model("qwen3_moe").model.layers[0]
    given = {
        "num_items_in_batch": 7, "output_router_logits": True, "chunk_mem_const": 8, "seq_idx": ids,
        "is_causal": False, "past_key_values": DynamicCache(), "use_cache": False, "absent": None,
    }  # fmt: skip
    assert used_arguments(layer, (), given) == {
        "seq_idx": ids, "is_causal": False, "past_key_values": None, "use_cache": False,
    }  # fmt: skip
    full.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    static = StaticCache(config=config, max_cache_len=8)
    for name in ("past_key_values", "cache"):  # As transformers 5.24 calls it
        for cache in (full, EncoderDecoderCache(full, DynamicCache()), static):
            assert used_arguments(layer, (), {name: cache}) is None


def test_a_copy_of_a_fitted_model_keeps_as_much():
    model = adapted()
    ids = token_ids(model)
    expected = train(adapted(), ids, 1)
    with fitted(model, least_memory(model)):
        copied = copy.deepcopy(model)
    assert_same_training(train(copied, ids, 1), expected)
    assert measured_peak(copied, ids) <= least_memory(model)


def peak_with_graphs(model: Any) -> int:
    """The most bytes of tensors in steps of AdamW, with all that graphs' memory holds."""
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], fused=True)
    for step in range(5):
        if step == 2:  # Recorded
            torch.cuda.reset_peak_memory_stats()
        ids = torch.randint(8192, (1, 1024), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    of_graphs = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    unused = sum(each["total_size"] - each["allocated_size"] for each in of_graphs)
    return torch.cuda.max_memory_allocated() + unused


@pytest.mark.gpu
def test_the_plan_of_one_of_four_ranks_is_what_its_steps_take():
    """With graphs in much memory and in the least, and without them in less."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_experts": 24}
    with one_of_ranks(4):
        model = packed(config={**sizes, "num_hidden_layers": 4, "vocab_size": 8192})
        model, least = sharded(model, mesh=init_device_mesh("cuda", (4,))), 0
        for more in (64 << 30, 64 << 30, 1 << 25, -(1 << 26)):  # Libraries allocate in the first
            with recorded(model), fitted(model, least + more, batch_size=1, seq_len=1024) as fit:
                least = fit._needed(fit._activities[levels.RECOMPUTE]) if more > 1 << 25 else least
                fit._room = 0  # No layer stays gathered
                planned, spare = fit._needs / (1 + fit._gaps), (256 << 20) * fit.graphs_fit
                assert fit.graphs_fit == (more > 0), str(fit)
                assert 0.9 * (planned - spare) <= peak_with_graphs(model) <= planned, str(fit)
