"""Writes atlasjax/preset_sizes.json: the widths (or numbers of layers) at which presets have the parameters of their sizes.

    python docs/preset_sizes.py

Counts the parameters of every preset, which takes minutes. Run it after a change of a preset or of a mixer's parameters.
"""

import json

from atlasjax import presets
from atlasjax.nn import ModelConfig


def text(configs: dict[tuple[str, str], ModelConfig]) -> str:
    """The table of fitted configs, by architecture and size: a line for each size and field."""
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for (architecture, size), config in configs.items():
        field = presets.fitted_field(config)
        rows.setdefault((size, field), {})[architecture] = getattr(config, field)
    lines = [f'"{size} {field}": {json.dumps(found, sort_keys=True)}' for (size, field), found in sorted(rows.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    presets.TABLE.write_text(text({names: presets.fitted(*names) for names in presets.fitted_names()}))
