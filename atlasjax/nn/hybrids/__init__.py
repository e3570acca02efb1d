"""Hybrid mixers that combine a memory and attention in one layer (Titans §4), one file each."""

from atlasjax.nn.hybrids.mac import MACMixer
from atlasjax.nn.hybrids.mag import MAGMixer
from atlasjax.nn.hybrids.mal import MALMixer

__all__ = ["MACMixer", "MAGMixer", "MALMixer"]
