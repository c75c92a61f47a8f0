"""`RoutingCallback`: how a training run spreads its tokens over the experts.

    trainer.add_callback(RoutingCallback(trainer))

For every layer it logs, of the tokens since the last log, to each tracker of the trainer and into
`trainer.state.log_history`: `routing_share/LAYER`, the share of the layer's assignments that its
busiest expert got, and `routing_idle/LAYER`, the number of experts without a token; and, with
matplotlib, a picture of layers by experts to TensorBoard and Weights & Biases.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils

from ..detection.routing import expert_counts
from ..errors import ConfigError

_TRACKERS = tuple(integration_utils.INTEGRATION_TO_CALLBACK.values())


class RoutingCallback(TrainerCallback):
    """Logs how many tokens each expert got while a transformers or TRL trainer trains.

    Hooks on the experts count on the device, in training mode, padding included, from the beginning
    to the end of `train()`; only a log waits for the device. Each process counts its own tokens,
    and the first one logs, to `trainer`'s trackers. Layers that are compiled or recorded before
    `train()` run no hooks: the first log is a `ConfigError`, as is a model without fused experts.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._handler = trainer.callback_handler
        self._hooks = ExitStack()
        self._counts: dict[str, Tensor] = {}
        self._seen = False

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self._hooks.close()
        self._counts = self._hooks.enter_context(expert_counts(model, args.device, training=True))
        self._seen = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._hooks.close()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **_: Any
    ) -> None:
        """Log the counts since the last log of a loss, and begin anew."""
        if "loss" not in (logs or ()):
            return  # of an evaluation, or of the end
        counts = {name: count[:-1].to("cpu", copy=True) for name, count in self._counts.items()}
        if not any(bool(count.any()) for count in counts.values()):
            if not self._seen:
                raise ConfigError(
                    "RoutingCallback has counted no token: the layers were compiled or recorded "
                    "before train() began, without its hooks; build the model anew."
                )
            return
        self._seen = True
        for count in self._counts.values():
            count.zero_()
        if not state.is_world_process_zero:
            return
        shares = {name: count / count.sum() for name, count in counts.items() if count.any()}
        numbers = {f"routing_share/{name}": float(share.max()) for name, share in shares.items()}
        numbers |= {f"routing_idle/{name}": int((s == 0).sum()) for name, s in shares.items()}
        if state.log_history:
            state.log_history[-1] |= numbers
        for tracker in self._handler.callbacks:
            if isinstance(tracker, _TRACKERS):
                tracker.on_log(args, state, control, logs=dict(numbers), model=model)
                _draw(tracker, shares, state.global_step)


def _draw(tracker: Any, shares: dict[str, Tensor], step: int) -> None:
    """Give a tracker a picture of the shares, if it takes pictures and matplotlib is there."""
    board = getattr(tracker, "tb_writer", None)
    wandb = tracker._wandb if isinstance(tracker, integration_utils.WandbCallback) else None
    if board is None and wandb is None:
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    grid = pad_sequence([*shares.values()], batch_first=True, padding_value=float("nan"))
    canvas = FigureCanvasAgg(Figure(figsize=(9, 4), layout="constrained"))
    axes = canvas.figure.add_subplot()
    canvas.figure.colorbar(axes.imshow(grid, aspect="auto", interpolation="nearest", vmin=0))
    axes.set(xlabel="expert", ylabel="layer with experts", title=f"step {step}")
    canvas.draw()
    pixels = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8)
    image = pixels.view(*canvas.get_width_height()[::-1], 4)[..., :3].numpy()
    if board is not None:
        board.add_image("routing", image, step, dataformats="HWC")
    if wandb is not None:
        wandb.log({"routing": wandb.Image(image), "train/global_step": step})
