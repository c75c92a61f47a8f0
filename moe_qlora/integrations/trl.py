"""TRL's GRPO and RLOO with vLLM as the sampler, where the adapter alone goes to the engine.

    from moe_qlora.integrations.trl import adapters_to_vllm

    with adapters_to_vllm(base="folder of the 16-bit model"):
        trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, ...))
    trainer.train()

TRL sends every weight of the model, merged. Here the engine has the base, and each sync writes the
adapter to a folder that the engine loads. TRL has no hook for this (UPSTREAM.md): a class of this
file replaces its trainers' `VLLMGeneration`.
"""

import importlib
import json
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from accelerate.utils import broadcast_object_list
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from ..checkpoint.folder import absolute
from ..errors import ConfigError, first_line
from ..serving.export import export_adapter

_TRAINERS = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")
_MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's values of max_lora_rank
_SERVE = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_SERVER_DEV_MODE=1 vllm serve BASE --enable-lora "
    "--max-lora-rank RANK --logprobs-mode processed_logprobs"
)


@contextmanager
def adapters_to_vllm(
    *,
    base: str | Path | None = None,
    folder: str | Path | None = None,
    any_base: bool = False,
    **engine_options: Any,
) -> Iterator[None]:
    """Trainers that are made in the block sync adapters, not models, to vLLM.

    `base` is the folder of the 16-bit model, which the engine serves, by default the trainer's own;
    `folder` is for adapters, under the same path on the server, by default a temporary one. With
    `any_base` the base need not be the model in the adapter's note. `engine_options` are more
    arguments of `vllm.LLM`, in colocate mode. A `ConfigError`: the model has no adapter, vLLM's
    sleep mode is on, or the server loads no adapters; an `AdapterError`: vLLM cannot serve this
    one; a `CheckpointError`: the base is missing, damaged or of another kind.
    """
    own: Any = {"base": base, "folder": folder, "any_base": any_base, "engine": engine_options}
    with ExitStack() as undo:
        for name in _TRAINERS:
            ours = partial(AdapterGeneration, **own)
            undo.enter_context(patch.object(importlib.import_module(name), "VLLMGeneration", ours))
        yield


class AdapterGeneration(VLLMGeneration):
    """TRL's sampler on vLLM, with the base's weights and with adapters as syncs."""

    def __init__(
        self, *, model: Any, base: Any, folder: Any, any_base: bool, engine: Any, **kwargs: Any
    ) -> None:
        if not getattr(model, "peft_config", None):
            raise ConfigError(
                f"The trainer's model is a {type(model).__name__} without an adapter: pass a "
                "peft_config, or make the trainer outside of adapters_to_vllm()."
            )
        self._base = absolute(base or model.get_base_model().name_or_path)
        self._any_base, self._engine = any_base, engine
        self._run, self._syncs = uuid.uuid4().hex[:8], 0
        super().__init__(model=model, **kwargs)
        made: list[Any] = [None]
        if self.accelerator.is_main_process:
            # One folder for all processes; a server, which may run elsewhere, gets its path.
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
            made[0] = tempfile.mkdtemp(prefix="adapters-", dir=folder and absolute(folder))
            weakref.finalize(self, shutil.rmtree, made[0], ignore_errors=True)
        broadcast_object_list(made, from_process=0)
        self._folder = Path(made[0])

    def _init_vllm(self) -> None:
        if self.enable_sleep_mode:
            raise ConfigError(
                "vllm_enable_sleep_mode is on, which discards the engine's base: leave it off, or "
                "let vLLM run as a server."
            )
        if self.mode == "server":
            # TRL's client needs vLLM here and a channel for weights; adapters need neither.
            if self.accelerator.is_main_process:
                url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
                self.vllm_client = AdapterClient(url, self.server_timeout)
            self.accelerator.wait_for_everyone()
            return
        if not hasattr(vllm_generation, "LLM"):  # TRL says that vLLM is not installed
            super()._init_vllm()
            return
        with patch.object(vllm_generation, "LLM", self._start_engine):
            super()._init_vllm()

    def _start_engine(self, **kwargs: Any) -> Any:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        class AdapterLLM(LLM):
            """vLLM's engine with the adapter that was loaded last."""

            adapter: Any = None

            def generate(self, *args: Any, **kwargs: Any) -> Any:
                return super().generate(*args, **{"lora_request": self.adapter, **kwargs})

            def load_adapter(self, name: str, number: int, folder: str) -> None:
                last, self.adapter = self.adapter, LoRARequest(name, number, folder)
                self.llm_engine.add_lora(self.adapter)
                if last is not None:
                    self.llm_engine.remove_lora(last.lora_int_id)

        config = self.model.peft_config[self.model.active_adapter]
        rank = max([config.r, *(config.rank_pattern or {}).values()])
        if rank > _MAX_RANKS[-1]:
            most = f"vLLM takes adapters up to rank {_MAX_RANKS[-1]}"
            raise ConfigError(f"The engine cannot start: the adapter's rank is {rank}, and {most}.")
        allowed = next(each for each in _MAX_RANKS if each >= rank)
        kwargs |= {"model": str(self._base), "enable_lora": True, "max_lora_rank": allowed}
        kwargs["quantization"] = None  # TRL guesses from the trainer's own 4-bit layers
        return AdapterLLM(**{**kwargs, **self._engine})

    def sync_weights(self) -> None:
        self._syncs += 1
        # A new name each time: vLLM's prefix cache goes by the adapter's name.
        name = f"moe-qlora-{self._run}-{self._syncs}"
        served, trained, model = self._folder / name, self._folder / "trained", self.model
        first, adapter = self.accelerator.is_main_process, model.active_adapter
        options = {"save_embedding_layers": False, "is_main_process": first}
        model.save_pretrained(str(trained), selected_adapters=[adapter], **options)
        if first:
            source = trained if adapter == "default" else trained / adapter
            export_adapter(source, served, base=self._base, target="vllm", any_base=self._any_base)
        self.accelerator.wait_for_everyone()
        if self.mode == "colocate":
            self.llm.load_adapter(name, self._syncs, str(served))
        elif first:
            self.vllm_client.load_adapter(name, str(served))
        self.accelerator.wait_for_everyone()
        for earlier in self._folder.iterdir() if first else ():
            if earlier != served:
                shutil.rmtree(earlier, ignore_errors=True)


class AdapterClient(VLLMClient):
    """TRL's client of a vLLM server, requesting the adapter that was loaded last.

    Unlike TRL's it needs no vLLM in its environment, as no weights are sent.
    """

    def __init__(self, base_url: str, timeout: float) -> None:
        self.base_url = base_url.rstrip("/")
        self.check_server(timeout)
        self.model = self._get(f"{self.base_url}/v1/models")["data"][0]["id"]
        self._adapter: str | None = None

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        end = time.monotonic() + total_timeout
        while True:
            try:
                _answer(f"{self.base_url}/health", timeout=max(retry_interval, 5.0))
                return
            except ConfigError:
                if time.monotonic() >= end:
                    raise
            time.sleep(retry_interval)

    def get_server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = self._get(f"{self.base_url}/server_info?config_format=json")
        return info["vllm_config"]

    def load_adapter(self, name: str, folder: str) -> None:
        body = {"lora_name": name, "lora_path": folder}
        _answer(f"{self.base_url}/v1/load_lora_adapter", body)
        last, self._adapter, self.model = self._adapter, name, name
        if last is not None:
            with suppress(ConfigError):
                _answer(f"{self.base_url}/v1/unload_lora_adapter", {"lora_name": last})

    # TRL's client uses `requests`, which may not be installed.
    def _get(self, url: str, **_: Any) -> Any:
        return json.loads(_answer(url))

    def _post(self, url: str, **request: Any) -> Any:
        return json.loads(_answer(url, request.get("json")))


def _answer(url: str, body: Any = None, timeout: float | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=timeout) as answer:
            return str(answer.read().decode())
    except HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        raise ConfigError(
            f"The vLLM server answered {error.code} at {url} ({text:.300}): start it with {_SERVE}."
        ) from error
    except (OSError, HTTPException) as error:
        said = f"No vLLM server answers at {url} ({first_line(error)}): start it with {_SERVE}."
        raise ConfigError(said) from error
