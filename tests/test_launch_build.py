"""What a start says of row sizes that this machine computes with other bits."""

import pytest

from jaxrl_post.config import EngineConfig
from jaxrl_post.launch.parts import build


@pytest.mark.parametrize("dropped", [[], [64]])
def test_row_sizes_that_nobody_chose_are_no_matter_of_his(dropped):
    assert build.not_used(EngineConfig.row_sizes, dropped) == build.not_used([*EngineConfig.row_sizes], dropped) == ""


@pytest.mark.parametrize(
    "sizes, dropped, said",
    [
        ((64,), [], ""),
        (
            (32, 64, 256),
            [32, 64],
            "engine.row_sizes: [32, 64] give other bits than 256 on this machine and are not used",
        ),
        ((64, 96), [64], "engine.row_sizes: [64] give other bits than 96 on this machine and are not used"),
    ],
)
def test_row_sizes_that_were_chosen_are_named_where_they_are_not_used(sizes, dropped, said):
    assert build.not_used(sizes, dropped) == said
