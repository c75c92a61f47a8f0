"""The switch: while it is on, every `from_pretrained` with a bitsandbytes config packs experts.

It changes two classes in transformers' quantizer mapping, and which config wins for a folder that
its maker quantized. Turning it off restores both. One load calls, in this order (quantizer.py):

    update_attn_implementation    is config.json that of a packed folder? then check the folder
    preprocess_model              on meta: detect expert weights, decide what is packed
    update_weight_conversions     hide that from transformers, which loads the rest
    tie_weights                   read, pack and put into place what was hidden (fill.py)
    postprocess_model             attach packed weights, select the experts forward (model.py)
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..errors import ConfigError

_METHODS = ("bitsandbytes_4bit", "bitsandbytes_8bit")
_MERGE = "merge_quantization_configs"


class EnabledOptions(NamedTuple):
    """Options of one `enabled` block, or of all open ones, for the loads within."""

    skip_modules: tuple[str, ...]  # patterns of modules that stay unpacked
    keep_codes: bool  # whether experts keep codes of their checkpoint that can be computed with
    offload: bool  # whether packed experts are loaded into host memory


_lock = threading.RLock()
# (stock, ours): quantizer classes by method, and the class method that chooses a config
_replaced: dict[str, tuple[Any, Any]] = {}
_blocks: list[EnabledOptions] = []  # that are open
_always = False


def enable() -> None:
    """Pack experts in every `from_pretrained(..., quantization_config=BitsAndBytesConfig(...))`.

    Such a config wins over the `quantization_config` of a folder that its maker quantized, which
    is dequantized as it is read. Holds for the whole process until `disable`, and counts no calls:
    use `enabled` for parts that nest. Models that were loaded meanwhile go on working after it.
    """
    global _always
    with _lock:
        _always = True
        _install()


def disable() -> None:
    """Undo `enable`, however often it was called; without it, do nothing.

    Blocks of `enabled` that are still open keep the switch on until they end.
    """
    global _always
    with _lock:
        _always = False
        _restore()


@contextmanager
def enabled(
    *, skip_modules: Sequence[str] = (), keep_codes: bool = False, offload: bool = False
) -> Iterator[None]:
    """Pack experts while loading, within the block.

    Blocks may nest and overlap, in several threads too: the switch goes off when the last one ends,
    also by an exception. It is the process's: other threads' loads are packed meanwhile as well.

    Args:
        skip_modules: Patterns, as in `llm_int8_skip_modules`, of modules that loads within the
            block leave in 16 bit, on top of their own config's.
        keep_codes: Let experts keep the MXFP4 codes of gpt-oss, 4.25 bits a weight. All else is
            dequantized and packed by the caller's config.
        offload: Load packed experts into host memory, as `offload_experts(model)`, which then
            returns the `Offload`, would move them there; the device never holds more than one of
            them. `quantize_experts` within the block does the same with a built model. Each rank
            of DDP has its own; with a `DistributedConfig` it is a `ConfigError`.
    """
    if offload not in (False, True):
        raise ConfigError(f"offload is {offload!r}; give True or False.")
    block = EnabledOptions(tuple(skip_modules), keep_codes, bool(offload))
    with _lock:
        _install()
        _blocks.append(block)
    try:
        yield
    finally:
        with _lock:
            _blocks[:] = [other for other in _blocks if other is not block]
            _restore()


def asked() -> EnabledOptions:
    """Return the settings of all open blocks together."""
    blocks = tuple(_blocks)
    skips = dict.fromkeys(name for block in blocks for name in block.skip_modules)
    keep_codes = any(block.keep_codes for block in blocks)
    return EnabledOptions(tuple(skips), keep_codes, any(block.offload for block in blocks))


def _install() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer

    from .quantizer import packing_quantizer

    if _replaced:
        return
    for method in _METHODS:
        stock = AUTO_QUANTIZER_MAPPING[method]
        _replaced[method] = stock, packing_quantizer(stock, asked)
        AUTO_QUANTIZER_MAPPING[method] = _replaced[method][1]
    merge = AutoHfQuantizer.__dict__[_MERGE]
    _replaced[_MERGE] = merge, _preferring_bitsandbytes(merge)
    setattr(AutoHfQuantizer, _MERGE, _replaced[_MERGE][1])


def _preferring_bitsandbytes(stock: Any) -> Any:
    # A copy of the caller's config wins for a folder that its maker quantized; else stock decides.
    from transformers import BitsAndBytesConfig

    from ..checkpoint.prequantized import MakerConfig, method_of
    from ..checkpoint.save import copy_config
    from .quantizer import MAKERS_CONFIG

    def merge_quantization_configs(cls: type, from_folder: Any, from_caller: Any) -> Any:
        ours = isinstance(from_caller, BitsAndBytesConfig)
        if isinstance(from_caller, Mapping):
            ours = bool(from_caller.get("load_in_4bit") or from_caller.get("load_in_8bit"))
        if _replaced and ours:
            makers = from_folder if isinstance(from_folder, Mapping) else from_folder.to_dict()
            if method_of(makers) is not None:
                MakerConfig(makers)  # refuses what is not read, before anything is downloaded
                config = copy_config(from_caller)
                setattr(config, MAKERS_CONFIG, makers)
                return config
        return stock.__get__(None, cls)(from_folder, from_caller)

    return classmethod(merge_quantization_configs)


def _restore() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer

    if _always or _blocks or not _replaced:
        return
    # What somebody else has put there since then stays; where it calls ours, ours calls stock.
    stock, ours = _replaced.pop(_MERGE)
    if AutoHfQuantizer.__dict__.get(_MERGE) is ours:
        setattr(AutoHfQuantizer, _MERGE, stock)
    for method, (stock, ours) in _replaced.items():
        if AUTO_QUANTIZER_MAPPING.get(method) is ours:
            AUTO_QUANTIZER_MAPPING[method] = stock
    _replaced.clear()
