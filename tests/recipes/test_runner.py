"""Running a recipe: what is refused before anything trains, and what a resumed run has to agree with."""

import json
from types import SimpleNamespace

import pytest

import rlx_plugins as rlx
from rlx_plugins.recipes import runner
from rlx_plugins.recipes.run_folder import RunFolder
from rlx_plugins.recipes.schema import Recipe, with_overrides
from rlx_plugins.recipes.task import Task, load_task


@pytest.fixture
def recipe():
    return Recipe(
        name="sample",
        title="A sample",
        host="trl",
        plugins={"clip": {"name": "ppo", "eps_high": 0.28}, "pruner": {"name": "arrol"}},
        profiles={"tiny": {"steps": 3, "plugins": {"pruner": {"length": 4}}, "notes": "x"}, "paper": {}},
    )


@pytest.fixture
def trained(monkeypatch):
    """Stands for the host: what it was asked to train, and one line of metrics for each run."""
    seen = []

    def train(recipe, profile, folder, **options):
        seen.append((recipe, profile, options))
        folder.log({"step": 1, "reward": 0.5})
        return {"accuracy_after": 0.75}

    monkeypatch.setattr(runner, "host_module", lambda host: SimpleNamespace(train=train))
    return seen


def test_the_host_gets_the_plugins_of_the_profile(recipe, trained, tmp_path):
    summary = runner.run(recipe, RunFolder.open(tmp_path), seed=3)
    (given, profile, options) = trained[0]
    assert given.plugins["pruner"] == {"name": "arrol", "length": 4} and profile.steps == 3
    assert options["seed"] == 3 and summary["accuracy_after"] == 0.75
    assert json.loads((tmp_path / "recipe.json").read_text())["recipe"]["plugins"]["pruner"]["length"] == 4


def test_a_run_is_resumed_with_what_it_was_started_with(recipe, trained, tmp_path):
    folder = RunFolder.open(tmp_path)
    runner.run(recipe, folder, seed=3)
    runner.run(recipe.model_copy(update={"title": "Another title"}), folder, seed=3, resume=True)
    assert len(trained) == 2


@pytest.mark.parametrize(
    ("words", "profile", "seed", "difference"),
    [
        ([], "tiny", 4, "seed was 3, now 4"),
        (["steps=5"], "tiny", 3, "steps was 3, now 5"),
        (["clip.eps_high=0.3"], "tiny", 3, "plugins.clip.eps_high was 0.28, now 0.3"),
        (["clip=none"], "tiny", 3, "plugins.clip was .*, now None"),
        (["learning_rate=0.1", "adam_beta2=0.9"], "tiny", 3, "learning_rate was None, now 0.1; arguments.adam_beta2"),
        ([], "paper", 3, "profile was 'tiny', now 'paper'"),
    ],
)
def test_a_run_is_not_resumed_with_anything_else(recipe, trained, tmp_path, words, profile, seed, difference):
    folder = RunFolder.open(tmp_path)
    runner.run(recipe, folder, seed=3)
    before = folder.recipe.read_text()
    with pytest.raises(rlx.ConfigError, match=f"started otherwise.*{difference}"):
        runner.run(with_overrides(recipe, words, profile), folder, profile=profile, seed=seed, resume=True)
    assert len(trained) == 1 and folder.recipe.read_text() == before


def test_another_recipe_or_host_does_not_go_on_with_a_run(recipe, trained, tmp_path):
    folder = RunFolder.open(tmp_path)
    runner.run(recipe, folder)
    for changes, difference in (({"name": "other"}, "name was 'sample'"), ({"host": "verl"}, "host was 'trl'")):
        with pytest.raises(rlx.ConfigError, match=difference):
            runner.run(recipe.model_copy(update=changes), folder, resume=True)


def test_a_start_that_trained_nothing_is_no_run_to_agree_with(recipe, trained, tmp_path, monkeypatch):
    def fail(recipe, profile, folder, **options):
        raise rlx.ConfigError("TRL has no argument 'learning_rat'")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "host_module", lambda host: SimpleNamespace(train=fail))
        with pytest.raises(rlx.ConfigError):
            runner.run(recipe, RunFolder.open(tmp_path))
    runner.run(with_overrides(recipe, ["steps=5"], "tiny"), RunFolder.open(tmp_path, resume=True), resume=True)
    assert len(trained) == 1 and not (tmp_path / "failure.json").exists()


def test_a_host_that_is_not_installed_is_told_with_what_to_install(recipe, monkeypatch, tmp_path):
    def missing(name, package=None):
        raise ImportError("No module named 'trl'")

    monkeypatch.setattr(runner.importlib, "import_module", missing)
    with pytest.raises(rlx.ConfigError, match=r"host trl can't be imported.*pip install 'rlx-plugins\[trl\]'"):
        runner.run(recipe, RunFolder.open(tmp_path))
    assert not (tmp_path / "recipe.json").exists()


def test_verl_that_is_not_installed_is_told_before_anything_is_made(recipe, monkeypatch, tmp_path):
    from rlx_plugins.hosts.verl import run as verl_run

    monkeypatch.setattr(verl_run.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(verl_run, "make_command", None)
    other = recipe.model_copy(update={"host": "verl"})
    with pytest.raises(rlx.ConfigError, match=r"host verl is not installed; pip install 'rlx-plugins\[verl\]'"):
        runner.run(other, RunFolder.open(tmp_path))


def test_a_module_of_a_task_that_is_not_found_is_told_with_where_python_looks():
    with pytest.raises(rlx.ConfigError, match="module 'no_such.tasks' can't be imported: .*; install its package, or"):
        load_task("no_such.tasks:sums", seed=0)


@pytest.fixture
def trl(recipe, monkeypatch, tmp_path):
    """A function that runs a tiny profile with changes on TRL, on a task of one column; no model may be loaded."""
    host = pytest.importorskip("rlx_plugins.hosts.trl.run", exc_type=ImportError)
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(host, "AutoModelForCausalLM", None)

    def run(column="prompt", **changes):
        data = datasets.Dataset.from_dict({column: ["1+1="] * 8})
        monkeypatch.setattr(host, "load_task", lambda task, seed: Task(train=data, rewards={"accuracy": len}))
        profile = {"model": "tiny", "task": "tiny", "rewards": ["accuracy"], **changes}
        chosen = {**recipe.model_dump(), "plugins": {"clip": "ppo"}, "profiles": {"tiny": profile}}
        runner.run(Recipe.model_validate(chosen), RunFolder.open(tmp_path))

    return host, run


def test_trl_refuses_an_option_that_plugins_decide_before_the_model_is_loaded(trl, monkeypatch):
    host, run = trl
    monkeypatch.setattr(host, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda path: None))
    monkeypatch.setattr(host, "load_model_path", lambda name: name)
    with pytest.raises(rlx.ConfigError, match="loss_type='grpo' would have no effect"):
        run(arguments={"loss_type": "grpo"})


def test_a_word_that_is_no_argument_of_trl_names_the_close_kinds_and_settings(trl):
    with pytest.raises(rlx.ConfigError, match="TRL has no argument 'clp'; did you mean 'clip'"):
        trl[1](arguments={"clp": "ppo"})
    with pytest.raises(rlx.ConfigError, match="TRL has no argument 'stpes'; did you mean 'steps'"):
        trl[1](arguments={"stpes": 3})


def test_a_model_that_is_not_there_is_told_in_one_message(trl):
    with pytest.raises(rlx.ConfigError, match="model '/no/such/folder' can't be loaded: .* tiny or smollm"):
        trl[1](model="/no/such/folder")


def test_a_task_without_prompts_is_told_with_the_columns_it_has(trl):
    with pytest.raises(rlx.ConfigError, match=r"`train` has no column 'prompt' \(it has question\)"):
        trl[1](column="question")
