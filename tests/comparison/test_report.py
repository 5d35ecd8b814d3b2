"""The report says plainly what can be said; its page needs no network."""

import re

import pytest

from rlx_plugins.comparison.report import markdown, page, write_report
from rlx_plugins.comparison.results import analyse


def report(arms, **options):
    results = analyse(arms, "base", planned=range(4), **options)
    return markdown(results, setting=["profile tiny"], command="rlx compare a b")


@pytest.fixture
def make_arms(make_run):
    def make(differences, **of_run):
        arms = {"base": [make_run("base", s, 0.5 + 0.01 * s) for s in range(len(differences))]}
        arms["new"] = [make_run("new", s, 0.5 + 0.01 * s + d, **of_run) for s, d in enumerate(differences)]
        return arms

    return make


def test_it_says_when_nothing_can_be_told_apart_and_how_many_seeds_it_would_take(make_arms):
    text = report(make_arms([0.02, -0.01, 0.01, 0.0]), effect=0.01)
    assert "**`new` cannot be told from `base` in accuracy with 4 seeds.**" in text
    assert "That does not show that they are equal." in text
    assert re.search(r"this many seeds: \d+ for `new` \(\+0\.005\)\.", text)
    assert "seeds for 0.01" in text
    assert "not distinguishable" in text


def test_it_names_what_is_better_with_interval_and_corrected_p(make_arms):
    text = report(make_arms([0.1, 0.11, 0.09, 0.1]))
    assert "**`new` is better than `base` in accuracy: +0.1**" in text
    assert "after Holm's correction" in text
    assert "cannot be told" not in text


def test_one_seed_has_no_interval_and_the_report_says_so(make_arms):
    text = report(make_arms([0.1]))
    assert "One seed gives differences but no interval" in text
    assert "one seed: no interval" in text


def test_no_seed_at_all_says_that_nothing_can_be_said(make_arms, make_run):
    arms = make_arms([0.1, 0.1])
    arms["new"] = [make_run("lost", s, finished=False) for s in range(2)]
    text = report(arms)
    assert "Left out, because none of its runs ended with a score: `new`." in text
    arms["base"] = [make_run("gone", s, finished=False) for s in range(2)]
    assert "Nothing can be said" in report(arms)


def test_dropped_seeds_and_the_error_are_listed(make_arms, make_run):
    arms = make_arms([0.1, 0.1, 0.1, 0.1])
    arms["new"][1] = make_run("crash", 1, finished=False, crash="exit code 1: error: a | b *c* <d>")
    text = report(arms)
    assert r"seed 1, for all arms: new: crashed, exit code 1: error: a \| b \*c\* \<d\>" in text
    assert "Dropped for all arms: seed 1." in text


def test_unequal_budgets_are_told(make_arms):
    text = report(make_arms([0.1, 0.1, 0.1, 0.1], tokens=140))
    assert "`new` used 1.40 times the generated tokens and 1.40 times the update tokens of `base`" in text
    assert "No arm differs" not in text


def test_matching_is_reported_with_how_it_was_verified(make_arms):
    text = report(make_arms([0.1, 0.1, 0.1, 0.1]))
    assert "hash of its initial parameters" in text
    assert "initial weights equal in 4 of 4 pairs; prompts equal in 80 of 80 generation batches of 4 pairs" in text


def test_prompts_that_an_arm_draws_itself_are_said_to_be_part_of_its_method(make_arms):
    text = report(make_arms([0.1] * 4, prompts=["x"] * 20, plugins={"sampler": "vade"}))
    assert "prompts equal in 0 of 80 generation batches" in text
    assert "the difference is part of the method" in text


def test_tables_have_as_many_cells_as_headers(make_arms):
    lines = report(make_arms([0.02, -0.01, 0.01, 0.0]), effect=0.01).split("\n")
    tables = 0
    for i, line in enumerate(lines):
        if re.fullmatch(r"\|(-+\|)+", line):
            tables += 1
            width = line.count("|")
            assert lines[i - 1].count("|") == width, lines[i - 1]
            for row in lines[i + 1 :]:
                if not row.startswith("|"):
                    break
                assert row.rstrip().count("|") == width, row
    assert tables == 5


def test_the_page_is_one_file_with_its_figures(make_arms, tmp_path):
    arms = make_arms([0.02, -0.01, 0.01, 0.0])
    write_report(tmp_path, analyse(arms, "base", planned=range(4)), arms, setting=["x"], command="rlx compare")
    html = (tmp_path / "report.html").read_text()
    assert html.count("data:image/png;base64,") == 2
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    assert "<table>" in html and "<script" not in html
    assert (tmp_path / "results.json").exists() and (tmp_path / "report.md").exists()


def test_text_from_runs_can_not_become_markup(tmp_path):
    html = page("# <script>alert(1)</script>\n\n<b>x</b>", tmp_path)
    assert "<script>" not in html and "<b>" not in html
