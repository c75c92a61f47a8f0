"""Packed models under DeepSpeed's ZeRO-2 and ZeRO-3, against one process. They run
where deepspeed is installed (0.19.8 was tried)."""

import importlib
import importlib.util
import os
from functools import partial

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from safetensors.torch import load_file
from torch import distributed
from torch.multiprocessing.reductions import StorageWeakRef

import moe_qlora
from moe_qlora.distributed.gather import whole
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers import training
from tests.helpers.folders import contents
from tests.helpers.ranks import are_same, assert_same_adapter, packed_bytes, said
from tests.helpers.training import SETTINGS, adamw, adapted, assert_same_training, loaded

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed here"
)

STEPS = 10
SIZES = {
    "hidden_size": 64, "moe_intermediate_size": 40, "num_hidden_layers": 2, "num_experts": 3,
    "vocab_size": 256,
}  # fmt: skip
# ZeRO-3 keeps parameters below this size whole, by default nearly all of a model as small as this.
ALL = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
ZERO = {"zero2": {"stage": 2}, "zero3": {"stage": 3, **ALL}}
CASES = {  # settings, steps, and whether checkpointing is reentrant; the rest is ZeRO's
    "zero2": ZERO["zero2"],
    "zero3": ZERO["zero3"],
    "zero3, small ones whole": {"stage": 3, "settings": "fp4", "reentrant": True, "steps": 3},
    "zero3, int8": {"stage": 3, **ALL, "settings": "int8", "steps": 3},
    "zero3, bf16": {"stage": 3, **ALL, "settings": "bf16 storage", "reentrant": False, "steps": 3},
}
SAVED = ("nf4", "int8", "bf16 storage")


def started(model, **zero):
    """The model's DeepSpeed engine."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": zero}
    optimizer = adamw(model) if any(p.requires_grad for p in model.parameters()) else None
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine, steps):
    """Mean losses over all ranks."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    losses = []
    engine.train()
    for ids in training.token_batches(0, steps, 12):
        own = ids.chunk(world)[rank]
        loss = engine(input_ids=own, labels=own).loss
        engine.backward(loss)
        engine.step()
        losses.append(training.mean_of_ranks(loss, world))
    return losses


def run_case(folder, name, *, settings="nf4", steps=STEPS, reentrant=None, **zero):
    model = adapted(loaded(folder / "plain", SETTINGS[settings]))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    before = packed_bytes(model, whole)
    losses = train(started(model, **zero), steps)
    assert are_same(before, packed_bytes(model, whole))
    partitioned = [
        key for key, parameter in model.named_parameters()
        if hasattr(parameter, "ds_tensor") and parameter.numel() == 0 and key in before
    ]  # fmt: skip
    assert bool(partitioned) == (zero["stage"] == 3)
    model.save_pretrained(folder / "trained" / name)
    return losses


def trainer(folder, name, world, zero):
    AcceleratorState._reset_state(True)
    options = {"use_cpu": True}
    if zero:  # accelerate takes DeepSpeed without use_cpu alone
        auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
        options = {"deepspeed": {**auto, "zero_optimization": zero}}
    arguments = training.four_steps(
        folder / name, world, train_sampling_strategy="sequential", **options
    )
    # after the arguments, which tell transformers of ZeRO-3
    return training.trainer_of(adapted(loaded(folder / "plain")), arguments)


def run_trainer(folder, name, world, zero):
    """Losses of four steps, and of the last two from a checkpoint; the adapter is saved."""
    first = trainer(folder, name, world, zero)
    first.train()
    first.save_model(str(folder / name / "saved"))
    first.model.save_pretrained(folder / name / "adapter")
    again = trainer(folder, f"{name}, again", world, zero)
    again.train(resume_from_checkpoint=str(folder / name / "checkpoint-2"))
    return training.logged_losses(first), training.logged_losses(again)


def run_saves(folder, out, zero):
    """Save what was not trained, which is bit for bit that of one process."""

    def save_full(model, file):
        full = moe_qlora.full_state_dict(model)
        assert bool(full) == (distributed.get_rank() == 0)
        if full:
            torch.save(full, file)

    for settings in SAVED:
        packed = started(loaded(folder / "plain", SETTINGS[settings]), **zero).module
        packed.save_pretrained(out / settings / "packed", max_shard_size="20KB")
        save_full(packed, out / settings / "full.pt")
    model = adapted(loaded(folder / "plain"))
    AcceleratorState._reset_state(True)
    config = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": zero}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    engine, _ = accelerator.prepare(model, adamw(model))
    model.save_pretrained(out / "adapter")
    # as in the examples of accelerate and PEFT
    accelerator.unwrap_model(engine).save_pretrained(
        out / "given",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(engine),
    )
    distributed.barrier()
    save_full(model, out / "full.pt")
    if zero["stage"] != 3:
        return {}
    calls = {
        "merge_adapter": (model.merge_adapter,),
        "load_adapter": (model.load_adapter, out / "adapter", "second"),
        "state_dict": (partial(model.save_pretrained, state_dict=None), out / "none"),
    }
    return {key: said(call, *args) for key, (call, *args) in calls.items()}


def take_deepspeed_on_cpus():
    """Let accelerate count the processes; it takes DeepSpeed on GPUs, or for one on a CPU."""
    stock = PartialState.__init__

    def init(self, cpu=False, **kwargs):
        stock(self, cpu=True, **kwargs)
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            self.distributed_type = DistributedType.DEEPSPEED

    PartialState.__init__ = init
    # An extension for shared memory, which would be compiled for a minute. By its module's name,
    # since deepspeed.comm.torch is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def held_after_forward(folder, settings):
    """Packed weights whose gathered tensors are there between forward and backward."""
    model = adapted(loaded(folder / "plain", SETTINGS[settings]))
    never = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    engine = started(model, stage=3, stage3_prefetch_bucket_size=0, **never, **ALL)
    gathered = []

    def note(module, args):
        for name, parameter in module.named_parameters():
            if not parameter.is_floating_point() and parameter.numel():
                gathered.append((name, StorageWeakRef(parameter.data.untyped_storage())))

    for module in model.modules():
        if hasattr(module, "parametrizations") or hasattr(module, "statistics"):
            module.register_forward_pre_hook(note)
    ids = torch.randint(5, 248, (6, 8))
    engine.train()
    loss = engine(input_ids=ids, labels=ids).loss
    assert gathered
    held = [name for name, storage in gathered if not storage.expired()]
    engine.backward(loss)
    engine.step()
    return held


def all_cases(rank, world, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
    take_deepspeed_on_cpus()
    results = {"held": [held_after_forward(folder, settings) for settings in ("nf4", "int8")]}
    results |= {name: run_case(folder, name, **case) for name, case in CASES.items()}
    for name, zero in ZERO.items():
        results["refusals"] = run_saves(folder, folder / f"{name}, saves", zero)
        results[f"{name}, trainer"] = run_trainer(folder, f"{name}, trainer", world, zero)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    tiny_model("qwen3_moe", **SIZES).save_pretrained(folder / "plain")
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return run_distributed(all_cases, 2, folder)


def adapter(folder):
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(results, folder, case):
    settings, steps = CASES[case].get("settings", "nf4"), CASES[case].get("steps", STEPS)
    model = adapted(loaded(folder / "plain", SETTINGS[settings]))
    expected = training.train(model, training.token_batches(0, steps, 12))
    model.save_pretrained(folder / "single" / case)
    saved = adapter(folder / "trained" / case)
    for result in results:
        run = (result[case], saved)
        assert_same_training(run, (expected, adapter(folder / "single" / case)), 1e-3)


def test_nothing_that_is_gathered_stays_until_the_backward(results):
    assert all(result["held"] == [[], []] for result in results)


@pytest.mark.parametrize("name", ZERO)
def test_models_and_adapters_are_saved_as_one_process_does(results, folder, name):
    saves, expected = folder / f"{name}, saves", folder / "expected" / name
    for settings in SAVED:
        model = loaded(folder / "plain", SETTINGS[settings])
        model.save_pretrained(expected / settings, max_shard_size="20KB")
        assert contents(saves / settings / "packed") == contents(expected / settings)
        assert are_same(torch.load(saves / settings / "full.pt"), model.state_dict())
    model = adapted(loaded(folder / "plain"))
    model.save_pretrained(expected / "adapter")
    for how in ("adapter", "given"):
        assert_same_adapter(saves / how, expected / "adapter")
    assert are_same(torch.load(saves / "full.pt"), model.state_dict())


def test_trainer(results, folder):
    single = trainer(folder, "single trainer", 1, {})
    single.train()
    single.save_model(str(folder / "single trainer"))
    trained, saved = training.logged_losses(single), adapter(folder / "single trainer")
    for name in ZERO:
        out = folder / f"{name}, trainer"
        for result in results:
            for losses in result[f"{name}, trainer"]:
                assert losses == pytest.approx(trained, abs=1e-5)
        for how in ("saved", "adapter"):
            assert_same_training((0, adapter(out / how)), (0, saved), 1e-3)
        assert (out / "checkpoint-2" / "adapter_model.safetensors").is_file()


def test_what_zero3_cannot_do_is_refused(results):
    for rank, refusals in enumerate(result["refusals"] for result in results):
        assert "model.embed_tokens.weight is sharded over ranks" in refusals["merge_adapter"]
        assert "moe-qlora merge" in refusals["merge_adapter"]
        assert "is partitioned by DeepSpeed ZeRO-3" in refusals["load_adapter"]
        # all but the first take no part, as hosts want it that give the first one a state dict
        assert ("leave the argument out" in refusals["state_dict"]) == (rank == 0)
