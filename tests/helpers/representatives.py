"""The model types whose numerics every run computes; those of the others are computed at night.

Detection and a forward run for every type of the registry. How it is loaded, and what LoRA, the
experts forward and merging compute, is decided by few traits of a type, and 82 of 95 share one set
of roles: here is a type of each value of each trait that the registry knows (a new value asks for a
new line), and of each kind of attention and routing beside.
"""

from collections.abc import Iterable
from typing import Any

import pytest

REPRESENTATIVES = {
    "dbrx": "a matrix of all experts, read from outside its module; gate and up apart",
    "deepseek_v32": "latent attention with an indexer, groups of experts, dense layers first",
    "deepseek_v4": "a hashed choice, one weight for each token",
    "diffusion_gemma": "tied experts; a router with a norm and scales of its own",
    "ernie4_5_vl_moe": "two modules of experts in a layer, one list of keys on disk",
    "gpt_oss": "(in, out), gate and up interleaved, biases",
    "granitemoe": "fused on disk, no shared experts, scaled embeddings",
    "hunyuan_v1_moe": "a Linear layer for a router",
    "inkling2_text": "a gate that no fast path knows",
    "inkling_mm_model": "stacked shared experts in the same choice; short convolutions",
    "jetmoe": "experts in attention, no gate, a call for each projection",
    "llama4_text": "(in, out), weights on the inputs, experts called with all tokens",
    "longcat_flash": "choices that are no experts; two attentions in a layer",
    "minimax": "lightning attention",
    "muse_spark_text": "a norm behind the experts",
    "nemotron_h": "up and down alone; Mamba layers",
    "openai_privacy_filter": "(in, out) with biases, not interleaved; no causal mask",
    "qwen2_moe": "a gated shared expert",
    "qwen3_moe": "nothing special: as most are",
    "qwen3_next": "gated delta nets",
    "qwen3_omni_moe": "no forward of its own, two towers",
    "step3p7": "fused on disk with gate and up apart; a vision tower",
    "zaya": "a router of several layers, normalized attention",
}


def cases(types: Iterable[Any]) -> list[Any]:
    """pytest's parameters, types or tuples that begin with one: `nightly` but representatives."""
    nightly = pytest.mark.nightly
    return [
        pytest.param(*each, marks=[] if each[0] in REPRESENTATIVES else nightly)
        for each in ((item,) if isinstance(item, str) else item for item in types)
    ]
