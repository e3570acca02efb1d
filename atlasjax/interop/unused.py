"""Tensors of older saves that change nothing: accepted, kept with the run, and exported unchanged."""

import math
import re

import numpy as np

from atlasjax.interop import tensors
from atlasjax.nn import ModelConfig
from atlasjax.train.errors import ConfigError

ROTARY = r"(?:.*\.)?(?:rotary|rotary_emb)\.(?:original_)?inv_freq"
"""Pattern of the names of wavelengths of rotary positions, which newer versions compute."""


def check(folder: tensors.Folder, extra: frozenset[str], model: ModelConfig) -> None:
    """Checks that what peers compute from config.json is what the files have.

    Args:
      folder: the weights.
      extra: the names of tensors that are no parameters.
      model: our config.

    Raises:
      ConfigError: wavelengths belong to another base. The message has the base that is in the files.
    """
    theta, size = model.attention.rope_theta, model.attention.rope_dim or model.attention_sizes.key_dim
    for name in sorted(extra):
        if re.fullmatch(ROTARY, name) is None:
            continue
        found = np.asarray(folder.read(name), np.float64)
        exponents = np.arange(0, size, 2) / size
        # A model without rotation has no use for them.
        if theta is None or (found.shape == exponents.shape and np.allclose(found, theta**-exponents, rtol=1e-2)):
            continue
        base = found.reshape(-1)[-1] ** (-1 / exponents[-1]) if found.size == exponents.size > 1 else math.nan
        right = f" (they are those of about {base:.4g})" if math.isfinite(base) else ""
        raise ConfigError(
            f"tensor {name!r} has {found.size} wavelengths that are not those of rope_theta {theta:g} for {size} channels, "
            f"which config.json gives{right}; the two should agree."
        )
