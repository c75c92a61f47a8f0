"""Top-k assignments sorted by expert, in Triton's interpreter, against a sort by torch."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from moe_qlora.kernels import limits
from moe_qlora.kernels import routing as routing_

pytestmark = pytest.mark.usefixtures("interpreted")


def check(routing, index, experts):
    """Compare all that is read of a routing with what torch sorts and counts."""
    flat = index.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat > experts), experts, flat)
    count = flat.numel()
    offsets = [int((flat < e).sum()) for e in range(experts + 1)]
    assert routing.expert_offsets[: experts + 1].tolist() == offsets
    assert routing.ends.tolist() == offsets[1:]
    order = flat.sort(stable=True).indices
    assert torch.equal(routing.order[:count].long(), order)
    assert torch.equal(routing.inverse[:count].long(), order.argsort())
    tables = [(routing.tiles, routing.tile)]
    assert (routing.counts[1] > 0) == (routing.tile == limits.TILE)
    if routing.counts[1]:
        tables.append((routing.wide, limits.WIDE_TILE))
        tables.append((routing.widest, limits.WIDEST_TILE))
    for table, tile in tables:
        expected = [
            [e, first] for e in range(experts) for first in range(offsets[e], offsets[e + 1], tile)
        ]
        rows = table.view(-1, 2).tolist()
        assert rows[: len(expected)] == expected
        assert all(expert == -1 for expert, _ in rows[len(expected) :])


@pytest.mark.parametrize("shape", [(1, 1), (37, 3), (200, 2), (400, 2), (1500, 3), (22000, 3)])
def test_routing(shape):
    index = torch.randint(6, shape)
    check(routing_.route(index, 5), index, 5)
    none = routing_.route(torch.empty(0, 2, dtype=torch.long), 3)
    assert none.expert_offsets[:4].tolist() == [0] * 4


@pytest.mark.parametrize("held", [0, 5, 6, -1])
@pytest.mark.parametrize("count", [60, 100])  # in tiles of 16 rows, and of 32
def test_all_assignments_to_one_expert_or_to_none_here(count, held):
    index = torch.full((count, 1), held)
    routing = routing_.route(index, 6)
    assert routing.tile == (16 if count == 60 else 32)
    check(routing, index, 6)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.integers(1, 16), st.integers(1, 8), st.integers(1, 300),
    st.sampled_from([torch.int64, torch.int32]), st.floats(0, 1), st.integers(0, 2**31),
)  # fmt: skip
@example(1, 8, 128, torch.int64, 1.0, 0)
def test_any_few_assignments(tokens, top_k, experts, dtype, part, seed):
    """`part`: of the experts, those that are chosen; and choices that are no expert here."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(experts, generator=generator)[: max(1, int(part * experts))]
    nobody = [-1, experts, experts + 1, experts + 7, -(2**31), 2**31 - 1]
    nobody += [2**40] if dtype == torch.int64 else []
    values = torch.cat([chosen, torch.tensor(nobody[: seed % 8])]).to(dtype)
    picks = torch.randint(len(values), (tokens, top_k), generator=generator)
    index = values[picks]
    routing = routing_.route(index, experts)
    check(routing, index, experts)
    assert routing.top_k == top_k


@pytest.mark.parametrize("experts", [1, 3, 60, 512])
def test_the_length_of_a_routing_holds_all_its_parts(experts):
    for count in [*range(0, 3000, 7), *range(3000, 300000, 9973)]:
        assert sum(routing_._sizes(count, experts)[2]) <= routing_.ints_size(count, experts)
