"""Settings and experiments as data."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tpo_gym.experiments.build import interactions, make_model
from tpo_gym.experiments.experiment import Claim, table
from tpo_gym.experiments.registry import EXPERIMENTS
from tpo_gym.experiments.settings import Settings, parse_override

BASE = Settings("TokenReversal", "TPO", updates=10, env={"sequence_length": 4, "vocab_size": 2, "reward": "terminal"})


def test_any_setting_changes_the_digest() -> None:
    other = dict(
        task="TokenCopy", algorithm="GRPO", updates=11, batch=1, group_size=2, epochs=3, candidates="actions",
        learning_rate=0.5, decay=True, policy="MlpPolicy", record="table", evaluate_every=7,
        env={"sequence_length": 5}, arguments={"eta": 2.0}, policy_arguments={"d_model": 8},
    )  # fmt: skip
    assert set(other) == {item.name for item in fields(Settings)}
    digests = {BASE.change({name: value}).digest for name, value in other.items()}
    assert len(digests | {BASE.digest}) == len(other) + 1


def test_changes_merge_dictionaries() -> None:
    changed = BASE.change({"env": {"sequence_length": 7}, "batch": 3})
    assert changed.env == {"sequence_length": 7, "vocab_size": 2, "reward": "terminal"}
    assert (changed.batch, BASE.env["sequence_length"]) == (3, 4)
    with pytest.raises(ValueError, match="bach"):
        BASE.change({"bach": 3})


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("updates=3", {"updates": 3}),
        ("sequence_length=7", {"env": {"sequence_length": 7}}),
        ("arguments.eta=2.5", {"arguments": {"eta": 2.5}}),
        ("decay=true", {"decay": True}),
        ("arguments.skip_neutral=False", {"arguments": {"skip_neutral": False}}),
        ("task=TokenCopy", {"task": "TokenCopy"}),
    ],
)
def test_overrides(text: str, changes: dict) -> None:
    assert parse_override(text, BASE) == changes


@pytest.mark.parametrize(("text", "message"), [("eta=2", "no setting 'eta'"), ("updates", "name=value")])
def test_wrong_overrides(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_override(text, BASE)


def test_an_override_keeps_the_panels_that_agree() -> None:
    terminal = EXPERIMENTS["terminal"].override(["sequence_length=7", "updates=50"])
    assert [panel.label for panel in terminal.panels] == ["prompts, H=7", "interactions, H=7"]
    assert {cell.settings.updates for cell in terminal.cells()} == {50}
    with pytest.raises(ValueError, match="leaves no part of terminal"):
        EXPERIMENTS["terminal"].override(["sequence_length=3"])
    with pytest.raises(ValueError, match="has the methods TPO, GRPO"):
        EXPERIMENTS["masking"].only(methods=["DQN"])


def test_interaction_matching_scales_single_sample_methods_only() -> None:
    cells = {(c.panel, c.method): c.settings for c in EXPERIMENTS["terminal"].cells()}
    dg, tpo = cells["interactions, H=8", "DG"], cells["interactions, H=8", "TPO"]
    assert (dg.batch, dg.learning_rate) == (800, pytest.approx(1e-3 * 8**0.5))
    assert tpo == cells["prompts, H=8", "TPO"]


def test_experiments_share_runs() -> None:
    folder = {(e.name, c.panel, c.method): c.settings.folder for e in EXPERIMENTS.values() for c in e.cells()}
    wide = [("mechanism", ""), ("group_size", "K=32"), ("masking", ""), ("epochs", "epochs=4")]
    assert len({folder[name, panel, "TPO"] for name, panel in wide}) == 1
    dense = [("vocabulary", "V=2"), ("variations", "bag, reverse copy"), ("temperature", "η=1")]
    assert len({folder[name, panel, "TPO"] for name, panel in dense}) == 1


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_claims_and_figures_name_what_there_is(name: str) -> None:
    experiment = EXPERIMENTS[name]
    cells = {(cell.panel, cell.method) for cell in experiment.cells()}
    assert {(claim.panel, claim.method) for claim in experiment.claims} <= cells
    for figure in experiment.figures:
        assert set(figure.panels or ()) <= {panel.label for panel in experiment.panels}
        assert set(figure.methods or ()) <= {method.label for method in experiment.methods}
    assert experiment.at_quick_scale().cells()


def test_tables() -> None:
    claims = table(("a", "b"), "final", {"X": (">95", 2.0), "Y": ("", "-")}, 0.01)
    assert claims == (
        Claim("a", "X", "final", 95 * 0.01, ">"),
        Claim("b", "X", "final", 2.0 * 0.01),
        Claim("b", "Y", "final", float("inf")),
    )


@pytest.mark.slow
def test_every_setting_of_the_paper_makes_a_model() -> None:
    distinct = {cell.settings.digest: cell.settings for e in EXPERIMENTS.values() for cell in e.cells()}
    for settings in distinct.values():
        small = settings if settings.candidates == "exact" else settings.change({"batch": 2})
        model = make_model(small, 0)
        assert interactions(small, model) >= small.updates
