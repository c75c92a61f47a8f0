"""Random sequences of public calls on CUDA: with experts in host memory all is as on the device."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from graphed import COMPILED, assert_near, batch, gradients, packed

import moe_qlora

pytestmark = [
    pytest.mark.gpu,
    # `generate` on a static cache compiles models without graphs, and the compiler warns.
    pytest.mark.filterwarnings("ignore"),
]

CALLS = 25


class Twins:
    """Two equal models, of which one has experts in host memory now and then."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        sizes = {"num_hidden_layers": self.rng.choice([3, 5, 6])}
        family = self.rng.choice(["qwen3_moe", "mixtral", "gpt_oss"])
        self.resident = packed(family, sizes)
        self.hosted = copy.deepcopy(self.resident)
        self.undo: dict[str, Any] = {}  # What is on: offloading, graphs, fitting
        self.did: list[str] = [family]

    def run(self) -> None:
        calls = {
            "offload": 4, "graphs": 2, "fit": 1, "checkpointing": 1, "train": 6, "twice": 2,
            "evaluate": 2, "generate": 1, "without_adapter": 1, "state": 1, "fails": 1,
        }  # fmt: skip
        for number in range(CALLS):
            name = self.rng.choices([*calls], [*calls.values()])[0] if number else "offload"
            self.did.append(name)
            getattr(self, name)()
        self.train()
        for off in self.undo.values():
            off.remove()
        self.train()

    def switch(self, name: str, on: Any) -> None:
        """Switch something off that is on, or on."""
        if name in self.undo:
            self.undo.pop(name).remove()
        else:
            self.undo[name] = on()

    def offload(self) -> None:
        count = self.rng.choice([None, 1, 2, 3])
        if "fit" not in self.undo:
            self.switch("offload", lambda: moe_qlora.offload_experts(self.hosted, layers=count))

    def graphs(self) -> None:
        keep = self.rng.random() < 0.5
        self.switch("graphs", lambda: moe_qlora.graph_layers(self.hosted, keep=keep))

    def fit(self) -> None:
        sizes = {"batch_size": 2, "seq_len": 64}
        self.switch("fit", lambda: moe_qlora.fit_memory(self.hosted, **sizes))

    def checkpointing(self) -> None:
        reentrant = self.rng.choice([False, True])
        for model in (self.resident, self.hosted):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()

    def train(self) -> None:
        for step in range(self.rng.choice([1, 3])):
            ids = batch(self.rng.randrange(100) + step)
            wanted, found = gradients(self.resident, ids), gradients(self.hosted, ids)
            assert_near(found, wanted, COMPILED)
        with torch.no_grad():
            for model in (self.resident, self.hosted):
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:  # The same, so that they stay twins
                        parameter.sub_(0.01 * wanted[1][name])

    def twice(self) -> None:
        """Two forwards before a backward, as DPO's."""
        found = []
        numbers = [self.rng.randrange(100) for _ in range(2)]
        for model in (self.resident, self.hosted):
            model.zero_grad()
            losses = [model(input_ids=batch(n), labels=batch(n)).loss for n in numbers]
            (losses[0] + 2 * losses[1]).backward()
            named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found.append((sum(losses).item(), named))
        assert_near(found[1], found[0], COMPILED)

    def evaluate(self) -> None:
        ids, logits = batch(self.rng.randrange(100)), []
        for model in (self.resident, self.hosted):
            with torch.no_grad():
                logits.append(model.eval()(input_ids=ids).logits.float())
            model.train()
        assert (logits[0] - logits[1]).norm() <= 0.02 * logits[0].norm()

    def without_adapter(self) -> None:
        with self.resident.disable_adapter(), self.hosted.disable_adapter():
            self.evaluate()

    def generate(self) -> None:
        ids = batch(self.rng.randrange(100), 8)
        kind = self.rng.choice([None, "static"])
        how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": kind}
        how["disable_compile"] = "offload" in self.undo  # its CUDA graphs take no hosted experts
        with torch.no_grad():
            tokens = self.hosted.eval().generate(input_ids=ids, **how)
            # Of the tokens before each: the same model computes them at once.
            logits = self.resident.eval()(input_ids=tokens).logits[:, 7:-1].float()
        for model in (self.resident, self.hosted):
            model.train()
        best, chosen = logits.amax(-1), logits.gather(-1, tokens[:, 8:, None])[..., 0]
        assert (best - chosen).max() <= 0.05 * best.abs().max()

    def state(self) -> None:
        state = self.hosted.state_dict()
        for name, tensor in self.resident.state_dict().items():
            if tensor.dtype == torch.uint8:
                assert torch.equal(state[name].cpu(), tensor.cpu()), name
        self.hosted.load_state_dict({name: tensor.clone() for name, tensor in state.items()})

    def fails(self) -> None:
        """An exception in the middle of a forward."""
        layers = self.hosted.get_base_model().model.layers

        def stop(*_: Any) -> None:
            raise InterruptedError

        handle = self.rng.choice(layers).register_forward_pre_hook(stop)
        with pytest.raises(InterruptedError):
            self.hosted(input_ids=batch(0), labels=batch(0))
        handle.remove()


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_with_experts_in_host_memory(seed: int) -> None:
    twins = Twins(seed)
    try:
        twins.run()
    except BaseException as error:
        error.add_note(f"seed {seed}: {' '.join(twins.did)}")
        raise
