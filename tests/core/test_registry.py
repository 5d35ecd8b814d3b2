"""Registering, finding and refusing plug-ins."""

import importlib.metadata
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest

import rlx_plugins as rlx
from rlx_plugins.core import registry
from rlx_plugins.core.kinds import FOLDERS, KINDS


@pytest.fixture
def temporary():
    """Names registered in a test, forgotten after it."""
    made = []
    yield lambda kind, name: made.append((kind, name)) or rlx.register(kind, name)
    for kind, name in made:
        registry.forget(kind, name)


def test_a_registered_class_is_created_by_name_with_its_parameters(temporary):
    @temporary("clip", "hard")
    @dataclass
    class Hard(rlx.Clip):
        eps: float = rlx.param(0.1, gt=0)

        def __call__(self, terms):
            return terms.ratio

    part = rlx.create("clip", "hard", eps=0.3)
    assert (part.kind, part.name, part.params()) == ("clip", "hard", {"eps": 0.3})
    assert "hard" in rlx.names("clip")


@pytest.mark.parametrize("name", ["my clip", "clip.hard", "a=b", "a,b", ""])
def test_a_name_that_flags_could_not_say_is_refused(temporary, name):
    with pytest.raises(rlx.RegistrationError, match="a name has letters, digits, _ and - only"):

        @temporary("clip", name)
        @dataclass
        class Hard(rlx.Clip):
            def __call__(self, terms):
                return terms.ratio


def test_an_unknown_name_lists_the_close_matches():
    with pytest.raises(rlx.ConfigError, match=r"unknown clip 'pppo'; did you mean 'ppo'.*rlx list clip"):
        rlx.create("clip", "pppo")


def test_a_name_of_another_kind_is_pointed_out():
    with pytest.raises(rlx.ConfigError, match="of kind advantage"):
        rlx.create("clip", "grpo")


def test_an_unknown_kind_lists_the_kinds():
    with pytest.raises(rlx.ConfigError, match="unknown kind 'clipp'; did you mean 'clip'"):
        rlx.create("clipp", "ppo")


def test_a_signature_that_does_not_fit_is_shown_beside_the_expected_one(temporary):
    with pytest.raises(
        rlx.RegistrationError, match=r"(?s)it has   __call__\(self, ratio\).*expected __call__\(self, terms"
    ):

        @temporary("clip", "wrong")
        @dataclass
        class Wrong(rlx.Clip):
            def __call__(self, ratio):
                return ratio


def test_a_missing_required_hook_is_named(temporary):
    with pytest.raises(rlx.RegistrationError, match=r"lacks draw\(self, n: 'int', ctx: 'Context'\)"):

        @temporary("sampler", "empty")
        @dataclass
        class Empty(rlx.Sampler):
            pass


def test_a_hook_the_kind_is_never_asked_for_is_refused(temporary):
    with pytest.raises(rlx.RegistrationError, match="defines look, which a sampler is never asked for"):

        @temporary("sampler", "looks")
        @dataclass
        class Looks(rlx.Sampler):
            def draw(self, n, ctx):
                return []

            def look(self, groups, ctx):
                return None


def test_the_base_class_and_the_dataclass_decorator_are_required(temporary):
    with pytest.raises(rlx.RegistrationError, match=r"must derive from rlx_plugins\.Clip"):
        temporary("clip", "x")(type("NotAClip", (), {}))
    with pytest.raises(rlx.RegistrationError, match="must be a dataclass"):
        temporary("clip", "x")(type("Plain", (rlx.Clip,), {"__call__": lambda self, terms: terms}))


def test_a_built_in_name_is_not_taken_over(temporary):
    with pytest.raises(rlx.RegistrationError, match="'ppo' is"):

        @temporary("clip", "ppo")
        @dataclass
        class Mine(rlx.Clip):
            def __call__(self, terms):
                return terms.ratio


def test_every_public_module_of_a_kind_registers_its_own_name_and_fits_its_protocol():
    for kind in KINDS:
        for name in registry.builtin_names(kind):
            cls = rlx.find(kind, name)
            assert cls.__module__ == f"rlx_plugins.{FOLDERS[kind]}.{name}", f"{kind} {name}"
            assert cls.__doc__ and cls.__doc__.strip(), f"{kind} {name} has no docstring"


def entry_point(monkeypatch, module, body):
    """Offer `body` as a third party's module under the entry-point group."""
    code = types.ModuleType(module)
    monkeypatch.setitem(sys.modules, module, code)
    point = importlib.metadata.EntryPoint("theirs", f"{module}:load", registry.ENTRY_POINT_GROUP)
    code.load = None
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: body())
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [point] if group == registry.ENTRY_POINT_GROUP else []
    )
    registry.load_entry_points.cache_clear()
    registry._entry_point_failures.clear()


@pytest.fixture
def fresh_entry_points():
    yield
    registry.load_entry_points.cache_clear()
    registry._entry_point_failures.clear()


def test_entry_points_of_other_distributions_are_found(monkeypatch, fresh_entry_points, temporary):
    def body():
        @temporary("clip", "theirs")
        @dataclass
        class Theirs(rlx.Clip):
            def __call__(self, terms):
                return terms.ratio

    entry_point(monkeypatch, "their_package", body)
    assert rlx.create("clip", "theirs").name == "theirs"


def test_a_broken_entry_point_harms_nobody_but_is_named_when_a_name_is_missing(monkeypatch, fresh_entry_points):
    def body():
        raise ImportError("no module named flux")

    entry_point(monkeypatch, "broken_package", body)
    assert rlx.create("clip", "ppo").name == "ppo"
    with pytest.raises(rlx.ConfigError, match="entry point theirs.*no module named flux"):
        rlx.create("clip", "theirs")


def test_importing_the_package_imports_no_host_and_no_method():
    code = (
        "import sys, rlx_plugins; "
        "hosts = {'trl', 'verl', 'vllm', 'ray', 'transformers', 'typer'}; "
        "bad = [m for m in sys.modules if m.split('.')[0] in hosts"
        " or m.startswith('rlx_plugins.') and not m.startswith('rlx_plugins.core')]; "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
