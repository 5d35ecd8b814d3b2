"""GDPO and DVAO: several reward components."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import ConfigError, RolloutBatch, create
from rlx_plugins.core.config import build
from rlx_plugins.core.host import HostProfile
from rlx_plugins.core.preparation import prepare


def components_batch(components, group=None, lengths=None, names=None):
    components = torch.as_tensor(components, dtype=torch.float64)
    size = len(components)
    lengths = torch.ones(size, dtype=torch.int64) if lengths is None else torch.tensor(lengths)
    columns = {
        "reward_components": components,
        "rewards": torch.where(components.isnan().all(1), torch.nan, components.nansum(1)),
        "group": torch.zeros(size, dtype=torch.int64) if group is None else torch.tensor(group),
        "response_mask": torch.arange(max(1, int(lengths.max()))) < lengths[:, None],
        "keep": torch.ones(size, dtype=torch.bool),
    }
    return RolloutBatch(columns | ({"component_names": names} if names else {}))


def run(name, components, group=None, lengths=None, names=None, **params):
    """[B] advantages of the first tokens, and the other columns."""
    columns = create("advantage", name, **params)(components_batch(components, group, lengths, names))
    return columns["advantages"][:, 0], columns


def same(got, want, atol=1e-9):
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


GRID = st.integers(-16, 16).map(lambda k: k / 8)
TABLE = st.lists(st.tuples(GRID, GRID, GRID), min_size=3, max_size=10).map(torch.tensor).map(torch.Tensor.double)
VARIED = TABLE.filter(lambda t: bool((t.std(0) > 0.1).all()))
GROUPS = [0, 0, 0, 0, 1, 1]
TWO = torch.tensor([[1.0, 0.2], [0.0, 0.8], [1.0, 0.5], [0.0, 0.5], [1.0, 0.1], [1.0, 0.3]], dtype=torch.float64)


# ---- gdpo ------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(VARIED, st.sampled_from([0.125, 4.0]), st.sampled_from(["token", "sample"]))
def test_the_scale_of_a_component_does_not_matter_to_gdpo(table, factor, whiten):
    scaled = table * torch.tensor([factor, 1.0, 1.0], dtype=torch.float64)
    got = run("gdpo", scaled, eps_group=1e-12, whiten=whiten)[1]["summed"]
    same(got, run("gdpo", table, eps_group=1e-12, whiten=whiten)[1]["summed"])


@settings(max_examples=30, deadline=None)
@given(VARIED, st.permutations([0, 1, 2]))
def test_permuting_components_together_with_their_weights_changes_nothing(table, order):
    weights = [1.0, 0.5, 0.25]
    for name in ("gdpo", "dvao"):
        got, _ = run(name, table[:, order], weights=[weights[k] for k in order])
        same(got, run(name, table, weights=weights)[0], atol=1e-6)


def test_gdpo_sums_to_zero_over_what_it_whitens():
    lengths = [3, 1, 2, 3, 1, 2]
    tokens = create("advantage", "gdpo")(components_batch(TWO, GROUPS, lengths))["advantages"]
    samples, _ = run("gdpo", TWO, GROUPS, lengths, whiten="sample")
    assert float(tokens.sum()) == pytest.approx(0, abs=1e-6)
    assert float(samples.sum()) == pytest.approx(0, abs=1e-9)
    assert float(samples.std()) == pytest.approx(1, abs=1e-3)


def test_gdpo_of_one_component_is_an_affine_function_of_grpo():
    grpo = create("advantage", "grpo")(components_batch(TWO[:, 1:], GROUPS))["advantages"][:, 0]
    got, columns = run("gdpo", TWO[:, 1:], GROUPS, lengths=[3, 1, 2, 3, 1, 2])
    same(columns["summed"], grpo)
    slope = (got[1] - got[0]) / (grpo[1] - grpo[0])
    same(got, got[0] + slope * (grpo - grpo[0]))


def test_a_group_without_spread_is_not_zero_after_gdpos_batch_step():
    got, columns = run("gdpo", [[1.0], [0.0], [5.0]], [0, 0, 1], lengths=[3, 1, 1])
    assert columns["summed"][2] == 0 and got[2] < -0.1


def test_gdpo_leaves_a_missing_entry_out_of_its_component_only():
    table = [[1.0, 0.5], [0.0, math.nan], [1.0, 0.1], [math.nan, math.nan]]
    summed = run("gdpo", table)[1]["summed"]
    first = run("gdpo", [[1.0], [0.0], [1.0]])[1]["summed"]
    second = run("gdpo", [[0.5], [0.1]])[1]["summed"]
    same(summed, torch.stack([first[0] + second[0], first[1], first[2] + second[1], first[0] * 0]))


@pytest.mark.parametrize(("host", "value"), [("verl", 0.5 / (1 + 1e-6)), ("trl", 0.0), (None, 0.0)])
def test_the_only_value_of_a_component_in_its_group_is_raw_in_verl_only(host, value):
    summed = run("gdpo", [[0.0, 0.5], [0.0, math.nan]], host=host)[1]["summed"]
    assert summed.tolist() == pytest.approx([value, 0])


@pytest.mark.parametrize("whiten", ["token", "sample"])
def test_one_row_or_token_cannot_be_normalised_over_the_batch(whiten):
    for lengths in ([1], [3]):
        assert float(run("gdpo", [[1.0, 0.5]], lengths=lengths, whiten=whiten, singleton="raw")[0]) == pytest.approx(0)


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gdpo", "dvao"])
def test_weights_may_be_given_by_component_name(name):
    got, _ = run(name, TWO, GROUPS, names=("accuracy", "form"), weights={"form": 0.5, "accuracy": 1.0})
    same(got, run(name, TWO, GROUPS, weights=[1.0, 0.5])[0])


@pytest.mark.parametrize("name", ["gdpo", "dvao"])
def test_weights_that_do_not_fit_the_components_are_refused(name):
    with pytest.raises(ConfigError, match=f"advantage {name}.weights: 3 weights for 2 reward components"):
        run(name, TWO, GROUPS, weights=[1.0, 1.0, 1.0])
    with pytest.raises(ConfigError, match=r"components are \['accuracy', 'form'\], the weights are for \['f'\]"):
        run(name, TWO, GROUPS, names=("accuracy", "form"), weights={"f": 1.0})


@pytest.mark.parametrize("weights", [[0.0, 0.0], {"a": 0.0}])
def test_dvao_refuses_weights_that_are_all_zero(weights):
    with pytest.raises(ConfigError, match="at least one must be above 0"):
        create("advantage", "dvao", weights=weights)


def test_dvao_refuses_a_negative_weight():
    with pytest.raises(ConfigError, match=r"advantage dvao.weights\[1\]: must be >= 0"):
        create("advantage", "dvao", weights=[1.0, -0.5])


@pytest.mark.parametrize("name", ["gdpo", "dvao", "lead"])
def test_a_host_without_reward_components_is_refused(name):
    with pytest.raises(ConfigError, match=f"advantage {name} needs the signal 'reward_components'"):
        build({"advantage": name}, HostProfile("table"))


def test_a_row_the_reward_function_could_not_score_is_out_of_every_component():
    rows = components_batch(TWO, GROUPS)
    unscored = rows.with_columns(rewards=torch.where(torch.arange(6) == 3, torch.nan, rows.rewards))
    kept = torch.arange(6) != 3
    parts = build({"advantage": "dvao"}, HostProfile("table", signals=frozenset({"reward_components", "logp_old"})))
    got = prepare(parts, unscored).batch.advantages
    same(got[kept], prepare(parts, rows.rows(kept)).batch.advantages)
    assert got[3] == 0


# ---- dvao ------------------------------------------------------------------------------------------------------------


def test_dvao_of_one_component_is_grpo():
    grpo = create("advantage", "grpo")(components_batch(TWO[:, 1:], GROUPS))["advantages"][:, 0]
    same(run("dvao", TWO[:, 1:], GROUPS)[0], grpo)


@settings(max_examples=50, deadline=None)
@given(VARIED, st.tuples(*[st.sampled_from([0.25, 1.0, 2.0])] * 3))
def test_dvao_never_exceeds_the_z_score_of_the_summed_rewards_and_has_its_sign(table, weights):
    summed = table @ torch.tensor(weights, dtype=torch.float64)
    z = (summed - summed.mean()) / (summed.std() + 1e-12)
    got, columns = run("dvao", table, weights=weights, eps=1e-12)
    assert (got.abs() <= z.abs() + 1e-9).all() and (got * z >= -1e-9).all()
    assert float(got.mean()) == pytest.approx(0, abs=1e-9)
    assert float(got.square().mean()) <= (len(got) - 1) / len(got) + 1e-9
    same(columns["dynamic_weights"].sum(1), torch.ones(len(got), dtype=torch.float64))


def test_dvao_weighs_a_component_scaled_up_like_one_with_a_higher_priority():
    scaled = TWO * torch.tensor([1.0, 3.0], dtype=torch.float64)
    same(run("dvao", scaled, GROUPS, weights=[1.0, 1.0])[0], run("dvao", TWO, GROUPS, weights=[1.0, 3.0])[0])
    same(run("dvao", TWO * 5, GROUPS, eps=1e-12)[0], run("dvao", TWO, GROUPS, eps=1e-12)[0])


def test_a_constant_component_adds_nothing_to_dvao():
    wider = torch.cat([TWO, torch.full((6, 1), 0.7, dtype=torch.float64)], 1)
    got, columns = run("dvao", wider, GROUPS, weights=[1.0, 1.0, 9.0])
    same(got, run("dvao", TWO, GROUPS, weights=[1.0, 1.0])[0])
    assert (columns["dynamic_weights"][:, 2] == 0).all()


def test_where_no_component_varies_dvao_gives_zero_advantages_and_weights():
    got, columns = run("dvao", [[0.3, 0.1], [0.3, 0.1], [5.0, 5.0]], [0, 0, 1])
    assert got.tolist() == [0, 0, 0]
    assert columns["dynamic_weights"].tolist() == [[0, 0]] * 3
