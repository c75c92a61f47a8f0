"""The loss in Liger's forward of a model, beside transformers' own from all logits."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig, get_peft_model
from synchronizing import no_synchronizing
from torch import Tensor, nn

pytest.importorskip("liger_kernel")

from moe_qlora.errors import ConfigError
from moe_qlora.integrations import liger_loss
from moe_qlora.integrations.liger import apply_liger
from moe_qlora.testing import requires_gpu, tiny_inputs, tiny_model

IGNORED = -100


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """For each loss that is ours, how many rows were known to have a label."""
    seen: list[int | None] = []
    original = liger_loss.linear_cross_entropy

    def counted(*args: Any, labelled: int | None, **options: Any) -> Tensor:
        seen.append(labelled)
        return original(*args, labelled=labelled, **options)

    monkeypatch.setattr(liger_loss, "linear_cross_entropy", counted)
    return seen


def made(model_type: str = "qwen3_moe", **options: Any) -> Any:
    model: Any = tiny_model(model_type, **options).train()
    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    return model


def batch(model: Any, some: int = 1) -> dict[str, Tensor]:
    ids = tiny_inputs(model)["input_ids"]
    labels = ids.clone()
    labels[:, :some] = IGNORED
    return {"input_ids": ids, "labels": labels}


def run(model: Any, inputs: dict[str, Any]) -> tuple[Any, Tensor]:
    weight = model.get_input_embeddings().weight
    weight.grad = None
    output = model(**inputs)
    output.loss.backward()
    return output, weight.grad


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("items", [None, 5, torch.tensor(7), "shifted"])
def test_as_transformers(model_type: str, items: Any, computed: list[int | None]) -> None:
    model = made(model_type)
    inputs: dict[str, Any] = batch(model, some=4)
    labels = inputs["labels"]
    if items == "shifted":
        inputs["shift_labels"] = nn.functional.pad(labels, (0, 1), value=IGNORED)[
            :, 1:
        ].contiguous()
    elif items is not None:
        inputs["num_items_in_batch"] = items
    expected, gradient = run(model, inputs)
    with apply_liger(model, in_layers=False):
        output, mine = run(model, inputs)
        assert output.logits is None
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine, gradient, rtol=1e-4, atol=1e-6)
    assert computed == [int((labels[:, 1:] != IGNORED).sum())]
    _, again = run(model, inputs)
    assert torch.equal(again, gradient) and len(computed) == 1


def test_no_labels_give_no_loss(computed: list[int | None]) -> None:
    model = made()
    with apply_liger(model, in_layers=False):
        output, gradient = run(model, batch(model, some=10_000))
    assert output.loss == 0 and not gradient.any() and computed == [0]


def test_what_is_more_than_a_loss_is_ligers(computed: list[int | None]) -> None:
    """Its function needs a GPU; here it is asked, and answers with what it was given."""
    model = made()
    asked: list[dict[str, Any]] = []

    def theirs(
        hidden_states: Tensor, lm_head_weight: Tensor, labels: Tensor, hidden_size: int,
        num_items_in_batch: Any = None, ignore_index: int = IGNORED, shift_labels: Any = None,
        final_logit_softcapping: float | None = None, return_token_accuracy: bool = False,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        asked.append({"cap": final_logit_softcapping, "labels": labels, **options})
        return hidden_states.sum()

    with apply_liger(model, in_layers=False):
        loss = model.forward.__func__.__globals__["LigerForCausalLMLoss"]
        loss.theirs = theirs
        inputs = batch(model)
        for more in (
            {"final_logit_softcapping": 30.0}, {"label_smoothing": 0.1}, {"ignore_index": 3},
            {"return_token_accuracy": True}, {"accum_dtype": torch.float32},
        ):  # fmt: skip
            model(**inputs, **more)
        assert len(asked) == 5 and asked[0]["cap"] == 30.0 and not computed
        assert all(given["labels"] is inputs["labels"] for given in asked)
        model.lm_head.weight.requires_grad_(True)
        model(**inputs)
        model.lm_head.weight.requires_grad_(False)
        with torch.autocast("cpu", torch.bfloat16):
            model(**inputs)
        assert len(asked) == 7 and not computed
        model(**inputs, final_logit_softcapping=None, label_smoothing=0.0)
        assert len(asked) == 7 and len(computed) == 1


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bf16(autocast: bool, computed: list[int | None]) -> None:
    model = made().bfloat16()
    inputs = batch(model)
    expected, _ = run(model, inputs)
    cast = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with apply_liger(model, in_layers=False), cast:
        output, _ = run(model, inputs)
    torch.testing.assert_close(output.loss, expected.loss, rtol=0.02, atol=0.02, check_dtype=False)
    assert len(computed) == 1


def test_copies_and_other_labels(computed: list[int | None]) -> None:
    model = made()
    inputs = batch(model)
    with apply_liger(model, in_layers=False):
        twin = copy.deepcopy(model)
        loss = run(model, inputs)[0].loss
        torch.testing.assert_close(run(twin, inputs)[0].loss, loss)
        assert computed[0] == computed[1] is not None
        model.eval()
        assert model(**inputs).logits is not None  # as Liger has it
        model.train()
        # Not by the call: of these it is not known how many there are.
        forward = model.forward
        torch.testing.assert_close(forward(**inputs).loss, loss)
    assert computed[0] is not None and computed[-1] is None


def test_heads_of_which_more_is_to_be_read_than_a_weight() -> None:
    model = tiny_model("qwen3_moe")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    with pytest.raises(ConfigError, match="the head has LoRA"):
        apply_liger(adapted.get_base_model(), in_layers=False)
    model = tiny_model("qwen3_moe")
    model.lm_head.bias = nn.Parameter(torch.zeros(model.lm_head.out_features))
    with pytest.raises(ConfigError, match="the head has a bias"):
        apply_liger(model, in_layers=False)
    model = tiny_model("qwen3_moe")
    model.lm_head.weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConfigError, match="the head is quantized"):
        apply_liger(model, in_layers=False)
    model = tiny_model("qwen3_moe")
    model.loss_function = lambda *args, **kwargs: torch.tensor(42.0)
    with pytest.raises(ConfigError, match="loss_function was set"):
        apply_liger(model, in_layers=False)


def test_forwards_that_liger_replaces_in_classes_go_back() -> None:
    model = tiny_model("llama4_text")
    cls = type(model)
    before = vars(cls)["forward"]
    with pytest.raises(ConfigError, match="replaces the forward of all llama4_text models"):
        apply_liger(model, in_layers=False)
    assert vars(cls)["forward"] is before and "forward" not in vars(model)


@pytest.mark.parametrize("when", ["before", "after"])
def test_forwards_go_back_inside_of_a_hook(when: str) -> None:
    """accelerate's, which was removed, or came, after Liger's forward."""
    model = tiny_model("qwen3_moe")
    if when == "before":
        add_hook_to_module(model, ModelHook())
    undo = apply_liger(model, in_layers=False)
    if when == "before":
        remove_hook_from_module(model)
    else:
        add_hook_to_module(model, ModelHook())
    undo.close()
    for name in ("forward", "_old_forward"):
        function = getattr(vars(model).get(name), "__func__", None)
        home = getattr(function, "__globals__", {}).get("__name__", "")
        assert not home.startswith("liger_kernel."), name
    run(model.train(), batch(model))


def test_lengths_that_differ() -> None:
    model = made()
    with apply_liger(model, in_layers=False), pytest.raises(ValueError, match="labels were given"):
        model(**batch(model), logits_to_keep=5)


@requires_gpu(1)
def test_the_loss_does_not_wait_for_its_results(computed: list[int | None]) -> None:
    model = made().cuda().bfloat16()
    inputs = {name: value.cuda() for name, value in batch(model).items()}
    with apply_liger(model, in_layers=False):
        run(model, inputs)
        hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state
        loss = model.forward.__func__.__globals__["LigerForCausalLMLoss"]
        head, width = model.lm_head.weight, model.config.hidden_size
        with no_synchronizing():
            loss(hidden, head, inputs["labels"], width).backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
def test_in_a_model_that_is_compiled_whole(computed: list[int | None]) -> None:
    """The rest is; the loss itself is left out of the graph."""
    model = made()
    inputs = batch(model)
    expected, gradient = run(model, inputs)
    torch.compiler.reset()
    with apply_liger(model, in_layers=False):
        output, mine = run(torch.compile(model, backend="eager"), inputs)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine, gradient, rtol=1e-4, atol=1e-6)
    assert len(computed) == 1


@pytest.mark.parametrize(("given", "rows"), [({}, 256), ({"chunk_mem_const": 1}, 32), (None, 32)])
def test_chunks_are_as_large_as_ligers(
    given: dict[str, int] | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is 8 times the hidden size, and there are 256 tokens."""
    seen: list[int] = []
    original = liger_loss.linear_cross_entropy

    def counted(*args: Any, chunk: int, **options: Any) -> Tensor:
        seen.append(chunk)
        return original(*args, chunk=chunk, **options)

    monkeypatch.setattr(liger_loss, "linear_cross_entropy", counted)
    model = made(vocab_size=512)
    ids = torch.randint(512, (2, 128))
    with apply_liger(model, in_layers=False):
        if given is None:  # As of a Liger whose function has no such option
            model.forward.__func__.__globals__["LigerForCausalLMLoss"].options.pop(
                "chunk_mem_const"
            )
        model(input_ids=ids, labels=ids, **(given or {}))
    assert seen == [rows]
