"""The plug-ins shown in the documentation register and run, and every built-in has its entry."""

import re
import shlex
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rlx_plugins as rlx
from docs import _hooks as hooks
from rlx_plugins.cli.descriptions import default_instance_value, parts_of
from rlx_plugins.core import registry
from rlx_plugins.core.config import specs
from rlx_plugins.core.host import CAPABILITIES
from rlx_plugins.core.kinds import KINDS
from rlx_plugins.hosts.table.profile import PROFILE as TABLE
from rlx_plugins.testing.evaluation.building import run_loss

ROOT = Path(__file__).parents[1]
EXAMPLES = [
    pytest.param(path, code, id=f"{path}-{i}")
    for path in ("README.md", "docs/writing-a-plugin.md")
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.S))
    if "@rlx.register" in code
]


@pytest.mark.parametrize(("path", "code"), EXAMPLES)
def test_a_shown_plugin_registers_and_runs(path, code):
    kind, name = re.search(r'@rlx\.register\("(\w+)", "(\w+)"\)', code).groups()
    try:
        exec("from dataclasses import dataclass\nimport rlx_plugins as rlx\n" + code, {"__name__": "shown"})
        part = rlx.create(kind, name)
        if kind == "clip":
            given = {"logp_new": [[-1.0, -2.0]], "logp_old": [[-1.2, -2.0]], "advantages": [1.0]}
            out = run_loss({"clip": part}, response_mask=[[1, 1]], **given)
            assert torch.isfinite(out["loss"]) and out["grad_logp"].abs().sum() > 0
        else:
            group = rlx.Group("a#0", "a", [1])
            ctx = rlx.Context(0, 1, groups=1, group_size=2, max_tokens=4, prompts={"a": [1]})
            assert len(part.more([group], ctx)) == 2
            for r in group.rollouts:
                r.finish("eos")
                r.reward = 0.0
            assert len(part.more([group], ctx)) == 2
            assert part.more([group], ctx) == []
    finally:
        registry.forget(kind, name)


def test_the_documentation_shows_plugins():
    assert len(EXAMPLES) == 3


# ---- the entries of docs/methods -----------------------------------------------------------------------------------

KINDS_BUILT_IN = [kind for kind in KINDS if registry.builtin_names(kind)]
HOW = "see 'A built-in method' in docs/writing-a-plugin.md"


def page(kind):
    """Text of the kind's page, "" where there is none."""
    path = ROOT / "docs" / "methods" / f"{kind}.md"
    return path.read_text() if path.exists() else ""


ENTRIES = [pytest.param(e, id=f"{kind}-{e.name}") for kind in KINDS_BUILT_IN for e in hooks.entries(page(kind))]


@pytest.mark.parametrize("kind", KINDS_BUILT_IN)
def test_every_builtin_has_one_entry_on_the_page_of_its_kind(kind):
    names = re.findall(r"(?m)^## (.+)$", page(kind))
    missing = registry.builtin_names(kind) - set(names)
    assert not missing, f"docs/methods/{kind}.md has no section '## {min(missing)}'; {HOW}"
    assert sorted(names) == sorted(registry.builtin_names(kind))


@pytest.mark.parametrize("kind", KINDS_BUILT_IN)
def test_an_entry_is_prose_that_ends_in_its_marker(kind):
    for text in re.split(r"(?m)^## ", page(kind))[1:]:
        name, body = text.split("\n", 1)
        where = f"docs/methods/{kind}.md, {name}"
        assert [(e.kind, e.name) for e in hooks.entries(body)] == [(kind, name)], f"{where}: one marker of its own"
        assert body.rstrip().endswith("-->"), f"{where}: the marker comes last"
        for part in ("**When.**", "**When not.**", "**Deviations.**"):
            assert body.count(part) == 1, f"{where}: {part}; {HOW}"


@cache
def signals_of_builtins():
    """What built-ins make for each other."""
    classes = [registry.find(kind, name) for kind in KINDS_BUILT_IN for name in registry.builtin_names(kind)]
    return frozenset().union(*(default_instance_value(cls, "provides") for cls in classes))


def able_host(plugins):
    """A host that can do everything and has every signal but those that a built-in would have to make."""
    chosen = [(kind, spec) for kind, value in plugins.items() for spec in specs(kind, value)]
    named = [part for kind, spec in chosen for part in parts_of(rlx.create(kind, spec.pop("name"), **spec))]
    yours = frozenset().union(*(part.requires for part in named)) - signals_of_builtins()
    supplied = TABLE.signals | hooks.TRL.signals | hooks.VERL.signals
    return rlx.HostProfile("any", supplied | yours, frozenset(CAPABILITIES))


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_command_lines_of_an_entry_build_its_plugin(entry):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    _, *lines = re.search(r"```bash\n(.*?)\n```|$", hooks.expanded(entry), re.S)[0].splitlines() or [""]
    read = {}
    for comment, line in zip(lines[::2], lines[1::2], strict=False):
        words = shlex.split(line)
        if comment == "# TRL":
            assert words[0] == "--plugins"
            read[comment] = words[1]
        elif comment == "# verl":
            [override] = OverridesParser.create().parse_overrides(words)
            assert override.key_or_group == "rlx.plugins"
            read[comment] = override.value()
    for text in read.values() or [" ".join(entry.words)]:
        plugins = rlx.parse_overrides(shlex.split(text))
        parts = rlx.build(plugins, able_host(plugins))
        assert entry.kind == "method" or entry.name in [part.name for part in parts[entry.kind]]


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.values[0].kind in ("advantage", "clip")])
def test_an_entry_shows_verls_own_flags_where_they_work(entry):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    overrides = OverridesParser.create().parse_overrides(shlex.split(entry.verl_flag()))
    chosen, *parameters = [(o.key_or_group, o.value()) for o in overrides if not o.key_or_group.endswith("_target_")]
    assert chosen[1] == f"rlx.{entry.name}"
    given = {key.rpartition(".")[2]: value for key, value in parameters}
    try:
        (advantage_by_flag if entry.kind == "advantage" else loss_by_flag)(entry.name, given)
    except rlx.ConfigError as refusal:
        assert not entry.flag, f"verl's own flags can't name it, remove `, verl flag`: {refusal}"
    else:
        assert entry.flag, "verl's own flags can name it: end its marker in `, verl flag`"


MASK = torch.tensor([[True, True], [True, False], [True, True], [True, True]])


def advantage_by_flag(name, parameters):
    from rlx_plugins.hosts.verl import flags

    rewards = torch.tensor([[1.0, 0], [0, 0], [1, 0], [0.5, 0]])
    flags.advantages(
        name,
        token_level_rewards=rewards,
        response_mask=MASK,
        config={"rlx": parameters},
        index=["a", "a", "b", "b"],
    )


def loss_by_flag(name, parameters):
    from rlx_plugins.hosts.verl import flags

    logp = torch.full(MASK.shape, -1.0)
    counts = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": None}
    flags.clipped_loss(
        name,
        old_log_prob=logp - 0.1,
        log_prob=logp,
        advantages=torch.ones(MASK.shape),
        response_mask=MASK,
        config=SimpleNamespace(policy_loss=SimpleNamespace(params=parameters), global_batch_info=counts),
    )


def test_a_marker_that_names_no_builtin_or_says_nonsense_ends_the_build():
    with pytest.raises(rlx.ConfigError, match="unknown clip 'bapp'"):
        hooks.with_entries("<!-- rlx: clip bapp -->")
    with pytest.raises(rlx.ConfigError, match="unknown parameter 'tarket'"):
        hooks.with_entries("<!-- rlx: clip bapo clip.tarket=1 -->")
    with pytest.raises(ValueError, match="not the marker of an entry"):
        hooks.with_entries("<!-- rlx: clip -->")


def test_the_site_builds_without_a_warning(tmp_path):
    """Links and anchors, pages outside the nav, markers: `validation` in mkdocs.yml makes each a warning."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    text = (tmp_path / "methods" / "clip" / "index.html").read_text()
    assert "<!-- rlx" not in text and 'id="bapo"' in text
