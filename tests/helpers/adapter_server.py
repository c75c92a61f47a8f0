"""A server of this process that answers as vLLM's does to TRL: adapters, completions, logprobs."""

from __future__ import annotations

import copy
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

import moe_qlora


class AdapterServer:
    """Samples with `generate` from a plain model and the adapter that a request names.

    `refusals` maps addresses to (status, text), answered instead. `deaf` samples from the base, as
    servers do that drop an adapter in silence.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.adapters: dict[str, Any] = {}
        self.loaded: list[tuple[str, list[str]]] = []  # names, and the keys in each file
        self.refusals: dict[str, tuple[int, str]] = {}
        self.deaf = False

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """Return what a server returns to one request."""
        if path == "/v1/models":
            return {"data": [{"id": "base"}]}
        if path.startswith("/server_info"):
            return {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}
        if path == "/v1/load_lora_adapter":
            self._load(body["lora_name"], Path(body["lora_path"]))
        elif path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        elif path == "/v1/completions":
            return {"choices": [one for ids in body["prompt"] for one in self._sample(ids, body)]}
        return ""

    def _load(self, name: str, folder: Path) -> None:
        from safetensors import safe_open

        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            self.loaded.append((name, sorted(file.keys())))
        adapted = moe_qlora.load_adapter(
            copy.deepcopy(self.model), str(folder), any_base=True, unpacked_ok=True
        )
        self.adapters[name] = adapted.float().eval()

    def _sample(self, ids: list[int], body: dict[str, Any]) -> list[dict[str, Any]]:
        model = self.model if self.deaf or body["model"] == "base" else self.adapters[body["model"]]
        output = model.generate(
            input_ids=torch.tensor([ids] * body["n"]),
            do_sample=True,
            max_new_tokens=body["max_tokens"],
            output_logits=True,
            return_dict_in_generate=True,
            top_k=0,
        )
        tokens = output.sequences[:, len(ids) :]
        logprobs = torch.stack(output.logits, 1).log_softmax(-1).gather(2, tokens[..., None])
        end = model.config.eos_token_id
        choices = []
        for row, values in zip(tokens.tolist(), logprobs[..., 0].tolist(), strict=True):
            length = row.index(end) + 1 if end in row else len(row)
            choices.append(
                {
                    "prompt_token_ids": ids,
                    "token_ids": row[:length],
                    "logprobs": {
                        "tokens": [f"token_id:{token}" for token in row[:length]],
                        "token_logprobs": values[:length],
                        "top_logprobs": [None] * length,
                    },
                }
            )
        return choices


@contextmanager
def running(server: AdapterServer):
    """Run a server in a thread; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer({})

        def do_POST(self):
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body):
            path = self.path.partition("?")[0]
            status, text = server.refusals.get(path, (200, None))
            if text is None:
                text = json.dumps(server.answer(path, body))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()
