"""The set-up of tests/conftest.py: the same simulated devices, kept programs and groups of tests."""

# All of it, and not the root's conftest.py: a plain `pytest` collects `tests` alone, and a module that both folders name as a
# plugin is refused by pytest below the root. Fixtures of one name replace each other, so nothing runs twice.
from tests.conftest import *  # noqa: F403
from tests.conftest import _collect_only_what_is_new, _free_compiled_programs  # noqa: F401  # a star leaves these out
