"""`rlx compare` on a command line."""

import pytest


def test_runs_that_exist_are_compared_in_a_table_and_a_report(command, make_run, tmp_path):
    for seed in range(3):
        make_run("a", seed, 0.5 + 0.01 * seed)
        make_run("b", seed, 0.6 + 0.011 * seed)
    made, out = tmp_path / "made", tmp_path / "out"
    code, text, _ = command("compare", str(made / "a"), str(made / "b"), "--output", str(out), "--effect", "0.01")
    assert code == 0
    row = next(line for line in text.splitlines() if line.startswith("b "))
    assert "+0.101" in row and "[0.09852, 0.1035]" in row and "better" in row
    report = (out / "report.md").read_text()
    assert "**`b` is better than `a` in accuracy" in report
    assert "rlx compare " in report
    code, _, err = command("compare", str(made / "a"), str(made / "b"), "--output", str(out))
    assert code == 2 and "already holds a comparison; use --resume" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{recipe}"], "two arms or more"),
        (["{recipe}", "x={recipe}:max_steps=3"], "unequal budgets"),
        (["{recipe}", "x={recipe}:weights=[1,1]", "--metric", "reward"], "not the same quantity"),
        (["{recipe}", "x={recipe}:clip=ppo", "--budget", "tokens"], "--budget: steps, generated=TOKENS"),
        (["{recipe}", "x={recipe}:clip=ppo", "--baseline", "y"], "no arm is called 'y'"),
    ],
)
def test_a_mistake_is_one_message_before_anything_is_written(command, recipe_file, tmp_path, words, message):
    out = tmp_path / "out"
    code, _, err = command("compare", *(w.format(recipe=recipe_file) for w in words), "--output", str(out))
    assert code == 2 and message in err and "Traceback" not in err
    assert not out.exists()
