"""What a trace follows from tensor to tensor."""

from __future__ import annotations

from collections import namedtuple

import torch

from moe_qlora.detection.trace import BlockTrace, tensors_of


def test_an_operation_in_place_gives_its_target_the_history_of_all_operands():
    weight = torch.empty(3, 8, 4, device="meta")
    trace = BlockTrace([weight], torch.Generator())
    x, other = torch.randn(5, 8), torch.randn(5, 8)
    trace.follow([x], [])
    with trace:
        from_x, from_other = (torch.zeros(5, 4).addmm_(t, weight[0]) for t in (x, other))
    assert trace.history(from_x).from_input
    assert not trace.history(from_other).from_input


def test_tensors_in_nested_containers_are_found_in_order():
    a, b, c, d, e = tensors = torch.ones(5).unbind()
    pair = namedtuple("pair", "first second")
    tree = [a, (1, [b, None], "text"), {"key": c, "other": (2.0, d)}, pair(torch.int8, e)]
    found = tensors_of(tree)
    assert len(found) == 5 and all(
        mine is other for mine, other in zip(found, tensors, strict=True)
    )
    assert tensors_of(a) == [a] and tensors_of(None) == []
    assert tensors_of(torch.ones(2, 2).topk(1)) and len(tensors_of(torch.ones(2).sort())) == 2
