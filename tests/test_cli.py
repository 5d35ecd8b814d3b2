"""The command `rlx`: what it prints and how it fails."""

import logging
import types
import warnings

import pytest

from rlx_plugins.cli import descriptions
from rlx_plugins.core.registry import find
from rlx_plugins.hosts import inspection


def test_list_shows_every_plugin_of_a_kind_with_what_it_needs(command):
    code, out, _ = command("list", "ratio")
    assert code == 0
    assert "token" in out and "logp_old" in out and "trl, verl, table" in out


def test_list_of_an_unknown_kind_names_the_close_match(command):
    code, _, err = command("list", "clips")
    assert code == 2 and "did you mean 'clip'" in err


def test_show_gives_parameters_defaults_paper_and_hosts(command):
    code, out, _ = command("show", "clip", "ppo")
    assert code == 0
    for text in ("eps_low", "0.2", "arXiv 1707.06347", "trl", "clip=ppo"):
        assert text in out


def test_show_without_a_kind_or_a_name_says_what_is_missing(command):
    code, _, err = command("show", "bapo")
    assert code == 2 and err.startswith("error: ") and "there is rlx show clip bapo" in err
    code, _, err = command("show", "clip")
    assert code == 2 and "names of kind clip: a2tgpo, bapo" in err
    code, _, err = command("show", "bappo")
    assert code == 2 and "'bappo' is neither; did you mean 'bapo'" in err


def test_square_brackets_are_text(command):
    assert "lies in [share_low, share_high]" in command("list", "allocator")[1]
    assert "[share_low, share_high]" in command("show", "allocator", "orchard_bar")[1]


def test_a_docstring_is_unwrapped_for_a_narrow_screen_but_its_formulas_are_not():
    prose = "a word " * 16
    doc = f"""{prose.strip()}
    and its end.

        x = 1,
        y = 2

    {prose.strip()}
    and another."""
    assert descriptions.unwrapped(type("X", (), {"__doc__": doc})).splitlines() == [
        f"{prose}and its end.",
        "",
        "    x = 1,",
        "    y = 2",
        "",
        f"{prose}and another.",
    ]


def test_show_of_an_unknown_name_is_one_message_and_exit_code_2(command):
    code, _, err = command("show", "clip", "pppo")
    assert code == 2
    assert err.startswith("error: unknown clip 'pppo'; did you mean 'ppo'") and "Traceback" not in err


def test_check_reports_every_recipe_and_fails_if_one_is_wrong(command, tmp_path):
    (tmp_path / "bad.yaml").write_text(
        "name: bad\ntitle: Bad\nhost: trl\nplugins: {clip: pppo}\nprofiles: {tiny: {}}\n"
    )
    (tmp_path / "good.yaml").write_text("name: good\ntitle: Good\nhost: trl\nprofiles: {tiny: {}}\n")
    code, out, err = command("check", str(tmp_path))
    assert code == 1
    assert "good.yaml" in out and "bad.yaml:4" in err


def test_run_refuses_a_bad_override_before_making_a_folder(command, tmp_path):
    (tmp_path / "good.yaml").write_text("name: good\ntitle: Good\nhost: trl\nprofiles: {tiny: {}}\n")
    folder = tmp_path / "run"
    code, _, err = command("run", str(tmp_path / "good.yaml"), "clip=pppo", "--output", str(folder))
    assert code == 2 and "did you mean 'ppo'" in err
    assert not folder.exists()


def test_version(command):
    from rlx_plugins import __version__

    assert command("version")[1].strip() == __version__


@pytest.mark.parametrize("text", ["What it is. More.", "What it is"])
def test_the_first_sentence_of_a_docstring(text):
    assert descriptions.first_sentence(type("X", (), {"__doc__": text})) == "What it is"


def test_a_method_needs_what_its_parts_need_and_do_not_make_themselves():
    guide, copris = find("method", "guide"), find("method", "copris_is")
    assert descriptions.needs(guide) == [
        "logp_rollout",
        "context",
        "rounds",
    ]  # the hint makes the ratio's logp_behavior
    assert {"abort", "forward:logp"} <= descriptions.default_instance_value(copris, "capabilities")
    assert descriptions.needs(find("clip", "dro")(penalty_coef=0.1)) == ["logp_old"]


def test_doctor_shows_the_seams_without_the_warnings_of_a_host(monkeypatch, command, caplog, recwarn):
    def check_seams():
        warnings.warn("no such engine", stacklevel=1)
        logging.getLogger("host").warning("no accelerator")
        return ["a seam is gone"]

    real = inspection.importlib.import_module
    noisy = types.SimpleNamespace(check_seams=check_seams)
    monkeypatch.setattr(
        inspection.importlib, "import_module", lambda name, *a: noisy if name.endswith(".seams") else real(name, *a)
    )
    monkeypatch.setattr(inspection.importlib.metadata, "version", lambda name: "1.16.0")
    code, out, err = command("doctor")
    assert code == 1 and "1 broken" in out and "trl: a seam is gone" in err
    assert "no accelerator" not in caplog.text
    assert not any("no such engine" in str(warning.message) for warning in recwarn.list)
    assert logging.getLogger("host").isEnabledFor(logging.WARNING)
