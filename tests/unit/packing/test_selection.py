"""The rule of skip patterns, held against transformers' own."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.quantizers.quantizers_utils import should_convert_module
from upstream import SKIPPED_MODULES

from moe_qlora.layout import ExpertParam
from moe_qlora.packing.selection import is_skipped, skipping_pattern

# Few components, so that patterns hit; names that start as others do, so that boundaries matter.
COMPONENTS = st.sampled_from(["layers", "0", "1", "11", "mlp", "gate", "gate_proj", "experts"])
NAMES = st.lists(COMPONENTS, max_size=5).map(".".join)
PIECES = st.one_of(COMPONENTS, st.sampled_from([*".*+?^$|", "(", ")", r"\.", r"\d", "[01]", "1.m"]))
PATTERNS = st.one_of(NAMES, st.lists(PIECES, max_size=5).map("".join))


def answer(rule, *arguments):
    try:
        return rule(*arguments)
    except re.error:
        return "not a regex"


@SKIPPED_MODULES
@settings(max_examples=150, deadline=None)
@given(NAMES, st.lists(PATTERNS, max_size=3))
def test_the_rule_is_that_of_transformers(name: str, patterns: list[str]) -> None:
    converted = answer(should_convert_module, name, patterns)
    expected = converted if isinstance(converted, str) else not converted
    assert answer(is_skipped, name, patterns) == expected


def test_any_name_of_a_weight_or_of_its_module_counts() -> None:
    shape = (2, 4, 4), *(2, 4, 4)
    names = "a.experts.up", "a.experts", "up"
    param = ExpertParam(*names, *shape, False, "up", "bfloat16", 64, "", ("b.w",))
    assert skipping_pattern(param, ["c", "a.experts$", "b"]) == "a.experts$"
    assert skipping_pattern(param, ["b.w"]) == "b.w"
    assert skipping_pattern(param, ["experts"]) == "experts"
    assert skipping_pattern(param, ["exp"]) is None
