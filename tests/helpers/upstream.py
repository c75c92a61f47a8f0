"""Faults of other packages' versions: a test that meets one is skipped there, and says why."""

import peft
import pytest
import transformers
from transformers.integrations.peft import MIN_PEFT_VERSION

from moe_qlora.versions import release_of

TRANSFORMERS = release_of(transformers.__version__)[:2]
RENAMED = ("jamba", "qwen3_omni_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker")
ADAPTER_METHODS = pytest.mark.skipif(
    release_of(peft.__version__) < release_of(MIN_PEFT_VERSION),
    reason=f"transformers' add_adapter, set_adapter and others ask for peft {MIN_PEFT_VERSION}",
)


def skip_llama4(model_type: str) -> None:
    """Skip what calls Llama4ForConditionalGeneration where its forward fails."""
    if model_type == "llama4" and TRANSFORMERS == (5, 24):
        pytest.skip("transformers 5.24's llama4 reads image_outputs, which its output lacks")


def skip_renamed(model_type: str) -> None:
    """Skip what compares with the registry where this type had other names."""
    if model_type in RENAMED and TRANSFORMERS < (5, 21):
        pytest.skip("the registry has the names of transformers 5.21 on")
