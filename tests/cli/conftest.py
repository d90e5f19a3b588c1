"""The command line, called in this process."""

import io
import sys

import pytest

from whet.cli import app


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run the command in this process: (exit code, standard output, standard error)."""

    def run(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["whet", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit_info:
            app.main()
        captured = capsys.readouterr()
        return exit_info.value.code, captured.out, captured.err

    return run
