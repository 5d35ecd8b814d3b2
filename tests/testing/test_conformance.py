"""Every built-in passes the conformance suite, and each of its checks catches the plug-in that is broken its way."""

import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from toy_plugins import BROKEN, SOUND, Even, MeanOverTheWidth, SquaredGap

import rlx_plugins as rlx
from rlx_plugins.core import registry
from rlx_plugins.testing import check_plugin
from rlx_plugins.testing.conformance import CHECKS, ConformanceError, settings_of_builtins
from rlx_plugins.testing.conformance.accelerator import accelerator, put
from rlx_plugins.testing.conformance.setting import EXEMPT

ROOT = Path(__file__).parents[2]
BUILTINS = settings_of_builtins()


@pytest.mark.parametrize("setting", BUILTINS, ids=[s.label.replace(" ", "-") for s in BUILTINS])
def test_a_builtin_conforms(setting):
    check_plugin(setting.kind, setting.name)


def test_every_exemption_is_of_a_builtin_and_has_a_reason():
    assert {(s.kind, s.name) for s in BUILTINS} >= set(EXEMPT)
    assert all(reason for reasons in EXEMPT.values() for reason in reasons.values())


# ---- toys: sound plug-ins, and ones that are broken in one way each ------------------------------------------------


@contextmanager
def registered(kind, cls, name="toy"):
    rlx.register(kind, name)(cls)
    try:
        yield
    finally:
        registry.forget(kind, name)


@pytest.mark.parametrize(("kind", "cls", "given"), SOUND, ids=[cls.__name__ for _, cls, _ in SOUND])
def test_a_sound_plugin_of_any_kind_conforms(kind, cls, given):
    with registered("distill", SquaredGap, "first"), registered(kind, cls):
        check_plugin(kind, "toy", **given)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize(("check", "kind", "cls"), BROKEN, ids=[cls.__name__ for *_, cls in BROKEN])
def test_a_broken_plugin_is_caught_by_exactly_that_check(check, kind, cls):
    with registered(kind, cls), pytest.raises(ConformanceError) as caught:
        check_plugin(kind, "toy")
    failed = caught.value.report.failed
    assert set(failed) == {check}, {name: failure.seen for name, failure in failed.items()}
    assert f"{kind} toy fails 1 of" in str(caught.value)
    for words in (failed[check].expected, failed[check].seen, failed[check].hint):
        assert words and words in str(caught.value)


def test_every_check_has_its_toy():
    assert {check for check, *_ in BROKEN} == set(CHECKS)


# ---- the interface ---------------------------------------------------------------------------------------------------


def test_the_report_names_every_check_once_and_says_why_one_was_skipped():
    report = check_plugin("clip", "ppo")
    assert set(report.passed) | set(report.skipped) == set(CHECKS) and not set(report.passed) & set(report.skipped)
    assert report.skipped["group_of_one"] == "no hook in the batch phase"
    lines = str(report).splitlines()
    assert lines[0] == "clip ppo" and len(lines) == 1 + len(CHECKS)
    assert "  group_of_one       skipped  no hook in the batch phase" in lines


def test_the_report_tells_whether_advantages_are_0_where_a_group_has_nothing_to_compare():
    assert check_plugin("advantage", "grpo").passed["equal_rewards"] == "advantages are 0"
    assert check_plugin("advantage", "v05").passed["equal_rewards"] == "advantages are not 0"


def test_every_check_says_what_it_looks_for():
    assert all(look.__doc__ for look in CHECKS.values())


@dataclass
class Hard(rlx.Clip):
    """Clips the ratio on both sides."""

    paper = "a toy"
    eps: float = rlx.param(0.1, gt=0, lt=1, doc="distance of the bounds from 1; ours")

    def __call__(self, terms):
        return -terms.advantages * terms.ratio.clamp(1 - self.eps, 1 + self.eps)


def test_a_plugin_is_named_or_given_as_a_class_or_an_instance():
    with registered("clip", Hard):
        for given in (("toy",), ("clip", "toy"), (Hard,), (Hard(eps=0.3),)):
            assert check_plugin(*given).plugin == "clip toy"
        with pytest.raises(rlx.ConfigError, match="clip toy.eps: must be > 0"):
            check_plugin("toy", eps=0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("nothing",), "'nothing' is no plug-in"),
        (("a2tgpo",), "'a2tgpo' is a plug-in of kinds advantage, clip, method"),
        (("clip", "bapp"), "did you mean 'bapo'"),
        ((Hard,), "Hard is not registered"),
        ((3,), "expected a name, a kind and a name, a class or an instance, got 3"),
    ],
)
def test_what_is_no_plugin_is_refused(given, says):
    with pytest.raises(rlx.ConfigError, match=says):
        check_plugin(*given)


@dataclass
class ByGap(Even):
    """Weighs tokens by a column of the user's, and turns by another plug-in's."""

    paper = "a toy"
    requires = frozenset({"gap", "norm_ig"})

    def __call__(self, batch):
        mask = batch.response_mask
        return {"weight": (rlx.masked(batch.gap, mask) * (1 + rlx.masked(batch.norm_ig, mask))).to(batch.dtype)}


def test_signals_of_users_are_passed_as_columns_and_those_of_plugins_come_from_plugins_beside():
    gap = {"gap": lambda batch: torch.rand(batch.response_mask.shape, dtype=torch.float64)}
    with registered("selector", ByGap):
        with pytest.raises(rlx.ConfigError, match="needs the signal 'gap': .* pass columns="):
            check_plugin(ByGap)
        with pytest.raises(rlx.ConfigError, match="needs the signal 'norm_ig': .* beside="):
            check_plugin(ByGap, columns=gap)
        assert "padding" in check_plugin(ByGap, columns=gap, beside={"advantage": "a2tgpo"}).passed
        with pytest.raises(rlx.ConfigError, match="columns: 'gap' must be a function of the batch"):
            check_plugin(ByGap, columns={"gap": torch.ones(3)})


def test_a_plugin_is_exempt_from_what_it_fails_and_only_from_that():
    with registered("aggregate", MeanOverTheWidth):
        assert check_plugin("toy", exempt={"padding": "as published"}).exempt == {"padding": "as published"}
    with registered("clip", Hard):
        with pytest.raises(ConformanceError, match="remove 'padding' from exempt"):
            check_plugin("toy", exempt={"padding": "as published"})
        with pytest.raises(rlx.ConfigError, match="unknown check 'pading'; did you mean 'padding'"):
            check_plugin("toy", exempt={"pading": "as published"})


SHOWN = re.findall(r"```python\n(.*?)```", (ROOT / "docs/writing-a-plugin.md").read_text(), re.S)
REGISTERED = r'@rlx\.register\("(\w+)", "(\w+)"\)'


@pytest.mark.parametrize("code", [code for code in SHOWN if re.search(REGISTERED, code)])
def test_the_plugins_shown_in_the_documentation_conform(code):
    kind, name = re.search(REGISTERED, code).groups()
    try:
        exec("from dataclasses import dataclass\nimport rlx_plugins as rlx\n" + code, {"__name__": "shown"})
        check_plugin(kind, name)
    finally:
        registry.forget(kind, name)


# ---- the pretended accelerator -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("look", "why"),
    [
        (lambda x: x.max().item(), "a value is read"),
        (lambda x: bool((x > 1).any()), "a value is read"),
        (lambda x: x.tolist(), "values are read"),
        (lambda x: x[x > 1], "the shape depends on values"),
        (lambda x: torch.unique(x), "the shape depends on values"),
        (lambda x: x[[0]], "indices are copied"),
        (lambda x: x.cpu(), "copied to the CPU"),
        (lambda x: torch.tensor([1.0], device=x.device), "numbers are copied to the device"),
        (lambda x: torch.zeros(2, 3).copy_(x), "copied between"),
    ],
)
def test_what_waits_for_an_accelerator_is_written_down_with_its_line(look, why):
    x = torch.arange(6.0).reshape(2, 3)
    with accelerator() as waits:
        look(put({"x": x})["x"])
    assert len(waits) == 1 and why in waits[0] and "(test_conformance.py:" in waits[0]


def test_what_does_not_wait_is_not_written_down_and_computes_what_the_cpu_does():
    x = torch.arange(6.0).reshape(2, 3)

    def compute(x):
        half = torch.full((), 0.5, dtype=x.dtype, device=x.device)
        chosen = torch.where(x > 1, x * half, torch.zeros_like(x)).cumsum(1)
        return chosen.scatter(1, torch.arange(2, device=x.device)[:, None], 7.0).sort(1).values

    with accelerator() as waits:
        remote = compute(put({"x": x})["x"])
        assert remote.device != x.device
        assert torch.equal(remote.local, compute(x))
    assert waits == []


def test_tensors_of_both_devices_do_not_mix():
    with accelerator(), pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
        put({"x": torch.ones(3)})["x"] + torch.ones(3)
