"""The settings of a host, and the `moe_qlora:` block of its YAML file: one pydantic model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from ...errors import ConfigError

BLOCK = "moe_qlora"

Role = Literal["gate_up", "gate", "up", "down", "expert"]  # those of layout.py

_ROLES = ", ".join(get_args(Role))
_ALLOWED = {
    "pack_experts": "true and false",
    "lora_experts": f"true, false and a list of roles ({_ROLES})",
    "lora_router": "true and false",
    "skip_modules": "a list of module names or patterns",
    "progress": "true and false",
}


class ExpertsSettings(BaseModel):
    """What a host does with experts; an unknown key is an error.

    Attributes:
        pack_experts: Pack them while the model loads; False leaves the model as the host loads it.
        lora_experts: Put LoRA on all packed experts, or on those of some roles; False leaves it to
            the host's own `target_parameters`.
        lora_router: Put LoRA on the routers too.
        skip_modules: Modules, as `llm_int8_skip_modules` names them, that stay in 16 bit besides
            those of the host's own config.
        progress: Show a bar while a built model is packed, and while an adapter is merged.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pack_experts: StrictBool = True
    lora_experts: StrictBool | Annotated[tuple[Role, ...], Field(min_length=1)] = False
    lora_router: StrictBool = False
    skip_modules: tuple[Annotated[StrictStr, Field(min_length=1)], ...] = ()
    progress: StrictBool = True

    @classmethod
    def read(cls, block: ExpertsSettings | Mapping[str, Any] | None) -> ExpertsSettings:
        """Return the settings of a YAML block, or all defaults; a wrong one is a `ConfigError`."""
        if isinstance(block, ExpertsSettings):
            return block
        if block is None:
            return cls()
        if not isinstance(block, Mapping):
            raise ConfigError(
                f"{BLOCK} is {block!r}; allowed is a block with the keys {', '.join(_ALLOWED)}."
            )
        try:
            settings = cls.model_validate(dict(block))
        except ValidationError as error:
            fault = error.errors()[0]
            key = str(fault["loc"][0])
            said = f"{BLOCK}.{key} is {shown(block.get(key))}; allowed are {_ALLOWED.get(key)}."
            if fault["type"] == "extra_forbidden":
                close = difflib.get_close_matches(key, _ALLOWED, 1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                said = f"{BLOCK}.{key} is no setting{hint}; allowed are {', '.join(_ALLOWED)}."
            raise ConfigError(said) from None
        for key in ("lora_experts", "lora_router", "skip_modules"):
            value = getattr(settings, key)
            if value and not settings.pack_experts:
                raise ConfigError(
                    f"{BLOCK}.{key} is {shown(value)}, and {BLOCK}.pack_experts is false: it is "
                    "for packed experts; take one of the two out."
                )
        return settings


def shown(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else repr(list(value) if isinstance(value, tuple) else value)
