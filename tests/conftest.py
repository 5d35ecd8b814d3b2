"""Property tests try the same examples in every run; `pytest --hypothesis-profile=default` looks for new ones."""

import sys

import pytest
from hypothesis import settings

# Without a deadline: an example that takes long on a busy machine is no failure.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture
def command(monkeypatch, capsys):
    """A function that runs `rlx <words>` on a screen of 200 columns: (exit code, standard output, standard error)."""
    cli = pytest.importorskip("rlx_plugins.cli", exc_type=SystemExit)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["rlx", *map(str, words)])
        monkeypatch.setattr(cli.out, "_width", 200, raising=False)
        monkeypatch.setattr(cli.err, "_width", 200, raising=False)
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run
