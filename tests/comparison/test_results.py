"""From runs to the numbers of a comparison: which seeds count, what is corrected, what is planned."""

import json

import pytest

import rlx_plugins as rlx
from rlx_plugins.comparison.protocol import Difference
from rlx_plugins.comparison.results import analyse, as_json, choose_metrics, score

BASE = [0.50, 0.52, 0.48, 0.51]


@pytest.fixture
def arms(make_run):
    """Arms of four seeds: `better` is 0.1 above the baseline, `same` differs by noise."""
    noise = [0.003, -0.004, 0.002, -0.002]
    return {
        "base": [make_run("base", s, x) for s, x in enumerate(BASE)],
        "better": [make_run("better", s, x + 0.1 + e) for s, (x, e) in enumerate(zip(BASE, noise))],
        "same": [make_run("same", s, x + e) for s, (x, e) in enumerate(zip(BASE, noise))],
    }


def run_analysis(arms, **options):
    return analyse(arms, "base", planned=range(4), **options)


def test_a_real_effect_is_found_and_noise_is_not(arms):
    r = run_analysis(arms)
    better, same = r.outcomes
    assert (r.metric, r.seeds, r.dropped) == ("accuracy", [0, 1, 2, 3], [])
    assert (better.verdict, same.verdict) == ("better", "unresolved")
    assert better.mean == pytest.approx(0.60225)
    assert better.holm == pytest.approx(2 * better.paired.p)
    assert [o.arm for o in r.resolved] == ["better"]


def test_the_verdict_follows_the_corrected_p_not_the_interval(make_run):
    d = [0.03, 0.01, 0.02, 0.008]
    arms = {"base": [make_run("base", s, 0.5) for s in range(4)]}
    arms |= {f"arm{k}": [make_run(f"arm{k}", s, 0.5 + x) for s, x in enumerate(d)] for k in range(5)}
    r = run_analysis(arms)
    assert all(o.paired.lo > 0 and o.paired.p < 0.05 < o.holm for o in r.outcomes)
    assert not r.resolved


def test_a_crashed_seed_is_dropped_for_all_arms_and_named(arms, make_run):
    arms["same"][2] = make_run("crashing", 2, finished=False, crash="exit code 1: error: out of memory")
    r = run_analysis(arms)
    assert r.seeds == [0, 1, 3]
    assert [o.paired.n for o in r.outcomes] == [3, 3]
    assert [(d.seed, d.why) for d in r.dropped] == [(2, "same: crashed, exit code 1: error: out of memory")]


def test_unfinished_and_missing_runs_and_lost_scores_are_dropped_with_their_reason(arms, make_run):
    arms["same"][0] = make_run("half", 0, finished=False)
    del arms["better"][1]
    arms["same"][3] = make_run("nan", 3, float("nan"))
    r = run_analysis(arms)
    assert r.seeds == [2]
    assert {d.seed: d.why for d in r.dropped} == {
        0: "same: not finished",
        1: "better: no run",
        3: "same: no finite score",
    }
    assert {o.verdict for o in r.outcomes} == {"too_few"}


def test_runs_with_other_data_are_dropped(arms, make_run):
    arms["same"][1] = make_run("unmatched", 1, 0.5, prompts=["other"] * 20)
    r = run_analysis(arms)
    assert r.seeds == [0, 2, 3]
    assert "same: other prompts than the baseline's run from step 1" in r.dropped[0].why


def test_an_arm_without_any_score_does_not_void_the_others(arms, make_run):
    arms["same"] = [make_run("broken", s, finished=False, crash="exit code 1: error: bad") for s in range(4)]
    r = run_analysis(arms)
    assert r.seeds == [0, 1, 2, 3]
    assert "none of its 4 runs ended with a score; seed 0: exit code 1: error: bad" in r.absent["same"]
    better, same = r.outcomes
    assert (same.verdict, same.holm) == ("no_pairs", None)
    assert better.holm == pytest.approx(better.paired.p)


def test_all_seeds_dropped_leaves_nothing(arms, make_run):
    arms["base"] = [make_run("gone", s, finished=False) for s in range(4)]
    r = run_analysis(arms)
    assert (r.absent.keys(), {o.verdict for o in r.outcomes}) == ({"base"}, {"no_pairs"})


def test_equal_scores_of_all_runs_are_no_difference(make_run):
    r = run_analysis({arm: [make_run(arm, s, 0.5) for s in range(4)] for arm in ("base", "same")})
    [same] = r.outcomes
    assert (same.verdict, same.paired.lo, same.holm, same.detectable, same.needed) == ("unresolved", 0, 1, 0, None)


def test_seeds_are_planned_at_the_level_shared_by_the_arms(arms):
    from rlx_plugins.comparison.statistics import seeds_for_effect

    r = run_analysis(arms, effect=0.002)
    same = r.outcomes[1]
    assert same.needed_for == seeds_for_effect(0.002, same.paired.sd, alpha=0.025)
    assert same.needed > 4


def test_other_metrics_are_means_of_the_last_records_or_totals(make_run):
    run = make_run("a", 0, 1.0)
    assert score(run, "reward") == 1.0
    assert score(run, "generated_tokens") == 2000
    assert score(run, "step") == 15.5
    assert score(run, "nothing") is None
    assert score(make_run("half", 0, finished=False), "accuracy") is None


def test_costs_are_better_when_lower(make_run):
    arms = {"base": [make_run("base", s, tokens=100 + s) for s in range(4)]}
    arms["cheap"] = [make_run("cheap", s, tokens=50 + s) for s in range(4)]
    assert run_analysis(arms, metrics=["generated_tokens"]).outcomes[0].verdict == "better"


def test_a_metric_nobody_has_is_refused_with_the_close_one(arms):
    with pytest.raises(rlx.ConfigError, match="no finished run has 'acuracy'; did you mean 'accuracy'"):
        run_analysis(arms, metrics=["acuracy"])


def test_reward_is_left_out_where_the_rewards_differ(arms):
    assert "reward" in choose_metrics(arms, [])
    differences = [Difference("same", "weights", [1.0], [2.0])]
    assert "reward" not in run_analysis(arms, differences=differences).metrics


def test_the_numbers_are_json(arms):
    written = json.loads(json.dumps(as_json(run_analysis(arms))))
    assert written["outcomes"][0]["verdict"] == "better"
    assert written["scores"]["accuracy"]["base"]["0"] == 0.5
