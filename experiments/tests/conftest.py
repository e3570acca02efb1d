"""The set-up of tests/conftest.py: the same simulated devices, kept programs and groups of tests."""

import pytest

# Imported, because pytest refuses `pytest_plugins` here when it collects from the root. Fixtures of one name replace each other, so
# nothing runs twice if both folders are collected. A star leaves out names with an underscore.
from tests.conftest import *  # noqa: F403
from tests.conftest import _collect_only_what_is_new, _free_compiled_programs  # noqa: F401


@pytest.fixture
def config_of_command(monkeypatch):
    """Reads a printed `atlasjax train`: command → the configuration that it would train. No text and no run is opened."""
    from atlasjax import cli

    class Reached(BaseException):  # no error: the command reports those in a line
        pass

    def train(config, **_):
        raise Reached(config)

    monkeypatch.setattr("atlasjax.cli.train.train", train)
    monkeypatch.setattr("atlasjax.cli.train._with_vocabulary", lambda config: config)
    for name in ("run_config", "check_there"):
        monkeypatch.setattr(f"atlasjax.cli.options.train.{name}", lambda _: None)

    def config_of(command):
        with pytest.raises(Reached) as reached:
            cli.main(command.split()[1:])
        return reached.value.args[0]

    return config_of
