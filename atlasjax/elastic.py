"""`atlasjax.mixers.elastic` by its public name, with its modules: `from atlasjax.elastic import hippo`."""

import sys

from atlasjax.mixers import elastic
from atlasjax.mixers.elastic import *  # noqa: F403  # for editors and type checkers

for _name, _module in list(sys.modules.items()):
    if _name == elastic.__name__ or _name.startswith(f"{elastic.__name__}."):
        sys.modules[_name.replace(elastic.__name__, __name__, 1)] = _module  # the same module, not a copy
