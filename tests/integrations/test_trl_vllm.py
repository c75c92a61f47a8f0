"""TRL's trainers over packed experts with vLLM's interface as the sampler: adapters go there.

A server of this process stands for vLLM's.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import NamedTuple

import datasets
import pytest
import torch
import trl
import trl.trainer.grpo_trainer
import trl.trainer.rloo_trainer
from adapter_server import AdapterServer, running
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

import moe_qlora
from moe_qlora.errors import ConfigError
from moe_qlora.integrations.trl import adapters_to_vllm

pytestmark = pytest.mark.usefixtures("trainable_linears", "quiet_loading")
MEAN, MAX = (f"sampling/sampling_logp_difference/{which}" for which in ("mean", "max"))
KINDS = {
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
}


@pytest.fixture(scope="module")
def packed(model_folder, stored):
    def load():
        with moe_qlora.enabled():
            return AutoModelForCausalLM.from_pretrained(
                model_folder, quantization_config=stored, dtype=torch.float32
            )

    return load


@pytest.fixture
def server(model_folder, packed, plain_twin):
    return AdapterServer(plain_twin(model_folder, packed()))


def letters(completions, **kwargs):
    return [sum("a" <= one <= "z" for one in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def make(model_folder, packed, tmp_path):
    """A function: one of TRL's trainers, whose sampler is a server."""

    def make(url, *, kind="grpo", lora=True, **options):
        trainer, config = KINDS[kind]
        lora_config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        torch.manual_seed(0)
        if lora:
            model = packed()
            lora_config = moe_qlora.adapt_lora_config(model, lora_config, experts=True)
        else:
            model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        args = config(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=8,
            learning_rate=1e-2,
            **{"use_vllm": True, "vllm_mode": "server", **options},
            vllm_server_base_url=url,
            vllm_server_timeout=0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        prompts = datasets.Dataset.from_list([{"prompt": f"say {at}"} for at in range(40)])
        made = trainer(
            model=model,
            args=args,
            reward_funcs=letters,
            train_dataset=prompts,
            peft_config=lora_config if lora else None,
        )
        for name, weight in made.model.named_parameters():
            if "lora_" in name:
                weight.data = weight.data.float()
        return made

    return make


def log_of(trainer):
    return [row for row in trainer.state.log_history if "reward" in row]


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_samples_from_the_adapter_as_it_is(kind, server, make, model_folder, tmp_path):
    shared = tmp_path / "shared"
    with running(server) as url:
        with adapters_to_vllm(base=model_folder, folder=shared):
            trainer = make(url, kind=kind, max_steps=3, beta=0.1)
        assert list(shared.iterdir())  # made with the trainer
        modules = (trl.trainer.grpo_trainer, trl.trainer.rloo_trainer)
        assert all(module.VLLMGeneration is VLLMGeneration for module in modules)
        trainer.train()
        before = server.adapters[trainer.vllm_generation.vllm_client.model]
        names = [name for name, _ in server.loaded]
        trainer.vllm_generation.sync_weights()
        after = server.adapters[trainer.vllm_generation.vllm_client.model]

    assert len(names) == 3
    ids = torch.arange(2, 26).reshape(1, 24)
    with torch.no_grad():
        trained = trainer.model.eval()(ids).logits
        stale, served, base = (model(ids).logits for model in (before, after, server.model))
    assert (served - trained).abs().max() < 1e-4 < 0.01 < (stale - trained).abs().max()
    assert (served - base).abs().max() > 0.01

    names = [name for name, _ in server.loaded]
    assert len(set(names)) == 4 and list(server.adapters) == [names[-1]]
    for _, keys in server.loaded:  # two layers, two factors: two projections, three of 4 experts
        assert len(keys) == 2 * 2 * (2 + 3 * 4)
        assert "base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_B.weight" in keys
    (folder,) = shared.iterdir()
    assert [one.name for one in folder.iterdir()] == [names[-1]]
    assert all("kl" in row for row in log_of(trainer))  # to the model with the adapter disabled
    if kind == "grpo":  # TRL measures it there alone
        assert len(log_of(trainer)) == 3
        assert all(0 < row[MEAN] <= row[MAX] < 1e-4 for row in log_of(trainer))


def test_a_server_that_drops_the_adapter_is_seen_in_the_log(server, make, model_folder):
    server.deaf = True
    with running(server) as url, adapters_to_vllm(base=model_folder):
        trainer = make(url, max_steps=3)
        trainer.train()
    first, *later = [row[MEAN] for row in log_of(trainer)]
    assert first < 1e-4  # a new adapter changes nothing
    assert min(later) > 1e-3


@pytest.mark.parametrize(
    ("path", "status", "text", "sentence"),
    [
        ("/health", 503, "", r"No vLLM server answers at .* after 0 s \(vllm_server_timeout\)"),
        ("/server_info", 404, "", r"answered 404 at .*/server_info.* started with VLLM_ALLOW_RUN"),
        ("/v1/load_lora_adapter", 404, "Not Found", r"answered 404 at .*adapter \(Not Found\)"),
        ("/v1/completions", 500, "broken", r"answered 500 at .*completions \(broken\)"),
    ],
)
def test_what_a_server_refuses(path, status, text, sentence, server, make, model_folder):
    if path == "/server_info" and not hasattr(vllm_generation.VLLMClient, "get_server_info"):
        pytest.skip("TRL 1.14 does not ask")
    server.refusals[path] = (status, text)
    with (
        running(server) as url,
        adapters_to_vllm(base=model_folder),
        pytest.raises(ConfigError, match=sentence),
    ):
        make(url, max_steps=1).train()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lora": False}, "The trainer's model is a .* without an adapter"),
        ({"vllm_mode": "colocate", "vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode is on"),
    ],
)
def test_what_cannot_be_synced(options, sentence, make, model_folder):
    with adapters_to_vllm(base=model_folder), pytest.raises(ConfigError, match=sentence):
        make("http://127.0.0.1:1", max_steps=1, **options)


@pytest.fixture
def engine_options(server, monkeypatch):
    """The arguments of each engine that TRL starts in this process; `server` answers for it."""
    started = []

    class Engine:
        def __init__(self, **options):
            started.append(options)
            self.llm_engine, self.names = self, {}

        def add_lora(self, request):
            self.names[request.lora_int_id] = request.lora_name
            body = {"lora_name": request.lora_name, "lora_path": request.lora_path}
            server.answer("/v1/load_lora_adapter", body)

        def remove_lora(self, number):
            server.answer("/v1/unload_lora_adapter", {"lora_name": self.names.pop(number)})

        def generate(self, prompts, sampling_params, use_tqdm, lora_request=None):
            name = lora_request.lora_name if lora_request else "base"
            body = {"model": name, "n": 1, "max_tokens": sampling_params.max_tokens}
            ids = [one["prompt_token_ids"] for one in prompts]
            return [_output(server.answer("/v1/completions", {**body, "prompt": [i]})) for i in ids]

    vllm = SimpleNamespace(LLM=Engine, SamplingParams=SimpleNamespace)
    request = SimpleNamespace(LoRARequest=_Request)
    for name, module in (("vllm", vllm), ("vllm.lora", vllm), ("vllm.lora.request", request)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("LLM", "SamplingParams"):
        monkeypatch.setattr(vllm_generation, name, getattr(vllm, name), raising=False)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # TRL sets them
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return started


class _Request(NamedTuple):
    lora_name: str
    lora_int_id: int
    lora_path: str


def _output(answer):
    (choice,) = answer["choices"]
    ids, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    logprobs = [
        {token: SimpleNamespace(logprob=value, rank=1)}
        for token, value in zip(ids, values, strict=True)
    ]
    return SimpleNamespace(
        prompt_token_ids=choice["prompt_token_ids"],
        outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs)],
    )


def test_an_engine_in_the_process(server, make, model_folder, engine_options):
    with adapters_to_vllm(base=model_folder, max_lora_rank=16, enforce_eager=True):
        trainer = make(None, max_steps=3, vllm_mode="colocate")
    trainer.train()
    (options,) = engine_options
    assert options["model"] == str(model_folder) and options["enable_lora"]
    assert options["quantization"] is None  # TRL guesses bitsandbytes, from the trainer's model
    assert options["max_lora_rank"] == 16 and options["enforce_eager"]
    names = [name for name, _ in server.loaded]
    assert len(set(names)) == 3 and list(server.adapters) == [names[-1]]
    assert all(row[MAX] < 1e-4 for row in log_of(trainer))
    assert vllm_generation.LLM is sys.modules["vllm"].LLM


def test_a_rank_that_no_engine_takes_is_refused(make, model_folder, engine_options, monkeypatch):
    monkeypatch.setattr("moe_qlora.integrations.trl._MAX_RANKS", (1, 2))
    with (
        adapters_to_vllm(base=model_folder),
        pytest.raises(ConfigError, match="rank is 4, and vLLM takes adapters up to rank 2"),
    ):
        make(None, max_steps=1, vllm_mode="colocate")
