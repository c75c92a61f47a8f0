"""Helpers for tests of this and other projects: tiny models, marks, processes.

    model = tiny_model("qwen3_moe", seed=1)
    logits = model(**tiny_inputs(model)).logits

torch, transformers and pytest are imported when a helper that needs them is called.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import logging
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import registry
from .errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig


_log = logging.getLogger(__name__)

_SPAN = 12  # tokens of a tiny input: no power of two, over half a tiny sliding window

# Classes whose token embedding is in the model around them.
_FED_HIDDEN_STATES = {"Qwen3OmniMoeTalkerModel"}


def registry_families() -> tuple[str, ...]:
    """Return every model type of the registry that the installed transformers knows, sorted."""
    from transformers import CONFIG_MAPPING

    return tuple(name for name in registry.model_types() if name in CONFIG_MAPPING)


def tiny_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    """Return a configuration of this architecture that builds in milliseconds.

    Overrides are configuration arguments; a mapping is merged into the part of that name. A type
    that the registry or transformers does not know is a `CheckpointError`.
    """
    from transformers import CONFIG_MAPPING

    kwargs = _merged(deepcopy(dict(registry.load(model_type).tiny_config)), overrides)
    if model_type not in CONFIG_MAPPING:
        raise CheckpointError(f"the installed transformers does not know {model_type!r}.")
    return CONFIG_MAPPING[model_type](**kwargs)


def _merged(kwargs: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    merged = {**kwargs, **more}
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(kwargs.get(name), dict):
            merged[name] = _merged(kwargs[name], value)
    return merged


def model_class(model_type: str) -> Any:
    """Return the transformers class that the registry names for this architecture.

    One that the installed transformers does not have is a `CheckpointError`.
    """
    import transformers

    name = registry.load(model_type).class_name
    if hasattr(transformers, name):  # which may be of another folder than the configuration
        return getattr(transformers, name)
    folder, _, _ = transformers.CONFIG_MAPPING[model_type].__module__.rpartition(".")
    package = Path(str(importlib.import_module(folder).__file__)).parent
    for path in sorted(package.glob("modeling_*.py")):
        modeling = importlib.import_module(f"{folder}.{path.stem}")
        if hasattr(modeling, name):
            return getattr(modeling, name)
    raise CheckpointError(f"the installed transformers has no class {name} for {model_type!r}.")


def tiny_model(
    model_type: str,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **overrides: Any,
) -> nn.Module:
    """Return a small model of this architecture with random weights, tied, in eval mode.

    Weights that transformers leaves uninitialised or zero are normally distributed too. The same
    seed gives the same model; the caller's random state does not change. Weights are float32 by
    default; nothing is allocated on "meta". Overrides and errors are those of `tiny_config`.
    """
    import torch
    from transformers import initialization

    config = tiny_config(model_type, **overrides)
    maker = model_class(model_type)
    on_meta = torch.device(device).type == "meta"
    was = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Fills uninitialised memory with NaN, which marks weights that were not set.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            mode = initialization.no_init_weights() if on_meta else nullcontext()
            with torch.device("meta" if on_meta else "cpu"), mode:
                model = maker._from_config(config, dtype=dtype or torch.float32)
        finally:
            torch.use_deterministic_algorithms(was, warn_only=warn)
        model.tie_weights()
        if not on_meta:
            _initialise(model, config)
            model.to(device)
    return model.eval()


def _initialise(model: nn.Module, config: PretrainedConfig) -> None:
    import torch

    std = getattr(config.get_text_config(), "initializer_range", None) or 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            unset = not bool(torch.isfinite(parameter).all())
            if parameter.dim() >= 2 and (unset or not bool(parameter.any())):
                parameter.normal_(0.0, std)
            elif unset:
                parameter.zero_()
        for buffer in model.buffers():
            if buffer.is_floating_point() and bool(torch.isnan(buffer).any()):
                buffer.zero_()


def tiny_inputs(model: nn.Module, *, batch: int = 2, seed: int = 0) -> dict[str, Any]:
    """Return keyword arguments for a forward of a tiny model; `ConfigError` if it takes no text.

    They are `input_ids` (batch, 12) int64 on the model's device, or `inputs_embeds` (batch, 12,
    hidden) where the model has no table of tokens.
    """
    import torch

    host: Any = model
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = host.config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if vocabulary is None or type(model).forward.__name__ == "_forward_unimplemented":
        raise ConfigError(f"{type(model).__name__} takes no text; pass it inputs of its own.")
    # Special tokens of tiny configurations are at the vocabulary's end.
    ids = torch.randint(5, vocabulary - 8, (batch, _SPAN), generator=generator)
    table = None
    if type(model).__name__ not in _FED_HIDDEN_STATES:
        with suppress(AttributeError, NotImplementedError):
            table = host.get_input_embeddings()
    if table is None:
        states = torch.randn(batch, _SPAN, text.hidden_size, generator=generator)
        dtype = next(model.parameters()).dtype
        return {"inputs_embeds": states.to(device, dtype)}
    return {"input_ids": ids.to(device)}


def requires_gpu(count: int = 1) -> Callable[[Any], Any]:
    """Return a decorator that marks a test `gpu` (or `multi_gpu`) and skips it without devices."""
    import pytest
    import torch

    mark = pytest.mark.gpu if count == 1 else pytest.mark.multi_gpu
    here = torch.cuda.device_count()
    skip = pytest.mark.skipif(here < count, reason=f"needs {count} CUDA devices, {here} here")
    return lambda test: mark(skip(test))


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in `world_size` processes joined by gloo, on the CPU.

    `fn` is a top-level function of a file, which the processes import anew; the arguments are
    picklable. Returns the ranks' results (anything that `torch.save` writes). If ranks raise, the
    first one's traceback is the text of a `RuntimeError`, as are the stacks of one that crashes. If
    it crashes in a thread without Python, all are started once more, with a logged warning.

    If the system has Python's fork server, it starts the processes: modules in
    `multiprocessing.set_forkserver_preload` are imported once for all calls, and environment
    variables are those of the first call.
    """
    import torch
    from torch.multiprocessing.spawn import start_processes

    methods = multiprocessing.get_all_start_methods()
    method = "forkserver" if "forkserver" in methods else "spawn"
    started_again = False
    while True:
        with tempfile.TemporaryDirectory() as folder:
            spec = ((fn.__code__.co_filename, fn.__name__), world_size, folder, args)
            ended: Exception | None = None
            try:
                start_processes(_rank_main, spec, nprocs=world_size, start_method=method)
            except Exception as error:  # noqa: BLE001 - raised below, unless a rank has reported
                ended = error
            # torch reports the rank that ended first, which may have only lost its peer, and no
            # rank that was interrupted or exited with 0.
            reports = [*Path(folder).glob("*.crash"), *Path(folder).glob("*.error")]
            failed = [(one, text) for one in reports if (text := one.read_text(encoding="utf-8"))]
            if not failed:
                if ended is not None:
                    raise ended
                files = [Path(folder) / f"{rank}.pt" for rank in range(world_size)]
                return [torch.load(file, weights_only=False) for file in files]
            file, text = min(failed, key=lambda report: report[0].stat().st_mtime_ns)
            said = f"rank {file.stem} failed:\n{text}"
            native = file.suffix == ".crash" and "Current thread" not in text
            if started_again or not native:
                raise RuntimeError(said) from ended
            # A thread of torch 2.13's gloo (pt_gloo_runloop, in malloc), once in hundreds of runs.
            _log.warning("%s\nIt crashed outside of Python: all ranks are started again.", said)
            started_again = True


def _rank_main(
    rank: int, target: tuple[str, str], world_size: int, folder: str, args: tuple[Any, ...]
) -> None:
    from datetime import timedelta

    import torch
    from torch import distributed

    torch.set_num_threads(1)
    # Open for as long as the process runs: a crash in C tells nothing but this.
    faulthandler.enable((Path(folder) / f"{rank}.crash").open("w", encoding="utf-8"))
    spec = importlib.util.spec_from_file_location("moe_qlora_rank_target", target[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    store = (Path(folder) / "store").as_uri()
    how: dict[str, Any] = {"rank": rank, "world_size": world_size}
    distributed.init_process_group("gloo", store, timedelta(seconds=120), **how)
    try:
        result = getattr(module, target[1])(rank, world_size, *args)
        torch.save(result, Path(folder) / f"{rank}.pt")
        distributed.barrier()
    except BaseException:  # as torch's CheckpointException is one
        # Written before the group falls apart, which makes the other ranks fail as well.
        (Path(folder) / f"{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    finally:
        distributed.destroy_process_group()
