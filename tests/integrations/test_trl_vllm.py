"""TRL's trainers with vLLM as the sampler, which a server of this process stands for."""

import copy
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import trl
import trl.trainer.grpo_trainer
import trl.trainer.rloo_trainer
from peft import LoraConfig
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

import moe_qlora
from moe_qlora.errors import ConfigError
from moe_qlora.integrations.trl import AdapterGeneration, adapters_to_vllm
from tests.helpers.training import loaded

pytestmark = pytest.mark.usefixtures("trainable_linears", "quiet_loading")
MEAN, MAX = (f"sampling/sampling_logp_difference/{which}" for which in ("mean", "max"))
KINDS = {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}


class AdapterServer(ThreadingHTTPServer):
    """Samples with `generate` from a plain model and the adapter that a request names."""

    def __init__(self, model):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.model, self.adapters = model, {}
        self.loaded = []  # names, and the keys in each file
        self.refusals = {}  # address -> (status, text), answered instead

    def answer(self, path, body):
        if path == "/v1/models":
            return {"data": [{"id": "base"}]}
        if path.startswith("/server_info"):
            return {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}
        if path == "/v1/load_lora_adapter":
            self.load(body["lora_name"], Path(body["lora_path"]))
        elif path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        elif path == "/v1/completions":
            return {"choices": [one for ids in body["prompt"] for one in self.sample(ids, body)]}
        return ""

    def load(self, name, folder):
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            self.loaded.append((name, sorted(file.keys())))
        adapted = moe_qlora.load_adapter(
            copy.deepcopy(self.model), str(folder), any_base=True, unpacked_ok=True
        )
        self.adapters[name] = adapted.float().eval()

    def sample(self, ids, body):
        model = self.model if body["model"] == "base" else self.adapters[body["model"]]
        output = model.generate(
            input_ids=torch.tensor([ids] * body["n"]), do_sample=True,
            max_new_tokens=body["max_tokens"], output_logits=True, return_dict_in_generate=True,
            top_k=0,
        )  # fmt: skip
        tokens = output.sequences[:, len(ids) :]
        logprobs = torch.stack(output.logits, 1).log_softmax(-1).gather(2, tokens[..., None])
        end = model.config.eos_token_id
        choices = []
        for row, values in zip(tokens.tolist(), logprobs[..., 0].tolist(), strict=True):
            n = row.index(end) + 1 if end in row else len(row)
            shown = [f"token_id:{token}" for token in row[:n]]
            told = {"tokens": shown, "token_logprobs": values[:n], "top_logprobs": [None] * n}
            choices.append({"prompt_token_ids": ids, "token_ids": row[:n], "logprobs": told})
        return choices


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}"
        path = self.path.partition("?")[0]
        status, text = self.server.refusals.get(path, (200, None))
        if text is None:
            text = json.dumps(self.server.answer(path, json.loads(body)))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def server(model_folder):
    with AdapterServer(loaded(model_folder).dequantize()) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def letters(completions, **kwargs):
    return [sum("a" <= one <= "z" for one in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def make(model_folder, tmp_path):
    """A function: one of TRL's trainers, whose sampler is a server."""

    def make(url, *, kind="grpo", lora=True, **options):
        trainer, config = KINDS[kind]
        lora_config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        torch.manual_seed(0)
        if lora:
            model = loaded(model_folder)
            lora_config = moe_qlora.adapt_lora_config(model, lora_config, experts=True)
        else:
            model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        args = config(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=8, num_generations=4,
            max_completion_length=8, learning_rate=1e-2, vllm_server_base_url=url,
            **{"use_vllm": True, "vllm_mode": "server", **options}, vllm_server_timeout=0,
            logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
            disable_tqdm=True,
        )  # fmt: skip
        prompts = datasets.Dataset.from_list([{"prompt": f"say {at}"} for at in range(40)])
        made = trainer(
            model=model, args=args, reward_funcs=letters, train_dataset=prompts,
            peft_config=lora_config if lora else None,
        )  # fmt: skip
        for name, weight in made.model.named_parameters():
            if "lora_" in name:
                weight.data = weight.data.float()
        return made

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_samples_from_the_adapter_as_it_is(kind, server, make, model_folder, tmp_path):
    shared = tmp_path / "shared"
    with adapters_to_vllm(base=model_folder, folder=shared):
        trainer = make(server.url, kind=kind, max_steps=3, beta=0.1)
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
        trained, stale, served = (m.eval()(ids).logits for m in (trainer.model, before, after))
    assert (served - trained).abs().max() < 1e-4 < 0.01 < (stale - trained).abs().max()

    names = [name for name, _ in server.loaded]
    assert len(set(names)) == 4 and list(server.adapters) == [names[-1]]
    for _, keys in server.loaded:  # two layers, two factors: two projections, three of 4 experts
        assert len(keys) == 2 * 2 * (2 + 3 * 4)
        assert "base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_B.weight" in keys
    (folder,) = shared.iterdir()
    assert [one.name for one in folder.iterdir()] == [names[-1]]
    log = [row for row in trainer.state.log_history if "reward" in row]
    assert len(log) == 3
    assert all("kl" in row for row in log)  # to the model with the adapter disabled
    if kind == "grpo":  # TRL measures it there alone
        assert all(0 < row[MEAN] <= row[MAX] < 1e-4 for row in log)


@pytest.mark.parametrize(
    ("path", "status", "text", "sentence"),
    [
        ("/health", 503, "", r"answered 503 at .*/health .* start it with VLLM_ALLOW_RUN"),
        ("/server_info", 404, "", r"answered 404 at .*/server_info.* start it with"),
        ("/v1/load_lora_adapter", 404, "Not Found", r"answered 404 at .*adapter \(Not Found\)"),
        ("/v1/completions", 500, "broken", r"answered 500 at .*completions \(broken\)"),
    ],
)
def test_what_a_server_refuses(path, status, text, sentence, server, make, model_folder):
    if path == "/server_info" and not hasattr(vllm_generation.VLLMClient, "get_server_info"):
        pytest.skip("TRL 1.14 does not ask")
    server.refusals[path] = (status, text)
    with adapters_to_vllm(base=model_folder), pytest.raises(ConfigError, match=sentence):
        make(server.url, max_steps=1).train()


def test_what_cannot_be_synced(make, model_folder):
    sleeping = {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    for options, sentence in (
        ({"lora": False}, "The trainer's model is a .* without an adapter"),
        (sleeping, "vllm_enable_sleep_mode is on"),
    ):
        with adapters_to_vllm(base=model_folder), pytest.raises(ConfigError, match=sentence):
            make("http://127.0.0.1:1", max_steps=1, **options)


def test_an_engine_in_the_process(model_folder, monkeypatch):
    """It gets the base, room for the rank, and after each load the newest adapter alone."""
    calls = []

    class Engine:
        def __init__(self, **options):
            calls.append(options)
            self.llm_engine = self

        def add_lora(self, request):
            calls.append(("add", request.number))

        def remove_lora(self, number):
            calls.append(("remove", number))

        def generate(self, prompt, lora_request):
            return lora_request.folder

    def request(name, number, folder):
        return SimpleNamespace(name=name, number=number, lora_int_id=number, folder=folder)

    vllm, lora = SimpleNamespace(LLM=Engine), SimpleNamespace(LoRARequest=request)
    for name, module in (("vllm", vllm), ("vllm.lora", vllm), ("vllm.lora.request", lora)):
        monkeypatch.setitem(sys.modules, name, module)
    config = LoraConfig(r=9, target_modules=["q_proj"])
    model = moe_qlora.get_peft_model(loaded(model_folder), config)
    held = SimpleNamespace(model=model, _base=model_folder, _engine={"enforce_eager": True})
    engine = AdapterGeneration._start_engine(held, quantization="bitsandbytes")
    options = {"model": str(model_folder), "enable_lora": True, "max_lora_rank": 16}
    assert calls == [{"quantization": None, "enforce_eager": True, **options}]
    for number in (1, 2):
        engine.load_adapter(f"a{number}", number, f"folder {number}")
    assert calls[1:] == [("add", 1), ("add", 2), ("remove", 1)]
    assert engine.generate("prompt") == "folder 2"
    model.peft_config["default"].r = 600
    with pytest.raises(ConfigError, match="rank is 600, and vLLM takes adapters up to rank 512"):
        AdapterGeneration._start_engine(held)
