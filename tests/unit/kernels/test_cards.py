"""Who multiplies on which card, told without the card."""

from __future__ import annotations

import pytest
import torch

from moe_qlora.kernels import cards

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "by_torch"),
    [((8, 0), False), ((8, 6), False), ((8, 9), False), ((9, 0), True), ((10, 0), True),
     ((12, 0), False), ((0, 0), False)],
)  # fmt: skip
def test_torchs_grouped_matmul_is_left_to_cards_where_it_does_not_wait(capability, by_torch):
    with cards.acting_as(cards.Card("nvidia", capability, cards.SMALL_SHARED)):
        assert cards.multiplies_by_torch(CUDA, torch.bfloat16) is by_torch
        assert not cards.multiplies_by_torch(CUDA, torch.float16)
        assert cards.multiplies_by_torch(CUDA, torch.float32)
        assert cards.multiplies_by_torch(torch.device("cpu"), torch.float16)


def test_acting_as_another_card_ends_with_its_block():
    with cards.acting_as(cards.PORTABLE):
        assert cards.card(CUDA) == cards.PORTABLE
        with cards.acting_as(cards.of_capability(cards.HOPPER)):
            assert cards.card(CUDA).runs_on
        assert cards.card(CUDA) == cards.PORTABLE
    assert cards.card(torch.device("cpu")).maker == ""
