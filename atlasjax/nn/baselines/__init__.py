"""Baseline mixers, one file each. They follow the protocol `atlasjax.nn.mixers.Mixer`."""

from atlasjax.nn.baselines.block_recurrence import BlockRecurrenceMixer
from atlasjax.nn.baselines.comba import CombaMixer
from atlasjax.nn.baselines.deltanet import DeltaNetMixer
from atlasjax.nn.baselines.gated_deltanet import GatedDeltaNetMixer
from atlasjax.nn.baselines.gated_deltaproduct import GatedDeltaProductMixer
from atlasjax.nn.baselines.gdn2 import GDN2Mixer
from atlasjax.nn.baselines.gla import GLAMixer
from atlasjax.nn.baselines.infini import InfiniMixer
from atlasjax.nn.baselines.kda import KDAMixer
from atlasjax.nn.baselines.log_linear import LogLinearMamba2Mixer, LogLinearMixer, LogLinearPlusPlusMixer
from atlasjax.nn.baselines.longhorn import LonghornMixer
from atlasjax.nn.baselines.mamba import MambaMixer
from atlasjax.nn.baselines.mamba2 import Mamba2Mixer
from atlasjax.nn.baselines.mamba3 import Mamba3Mixer
from atlasjax.nn.baselines.melodi import MelodiMixer
from atlasjax.nn.baselines.memorizing import MemorizingMixer
from atlasjax.nn.baselines.mesa import MesaMixer
from atlasjax.nn.baselines.momentum_deltanet import MomentumDeltaNetMixer
from atlasjax.nn.baselines.preconditioned import PGDNMixer, PKDAMixer
from atlasjax.nn.baselines.retnet import RetNetMixer
from atlasjax.nn.baselines.rwkv7 import RWKV7Mixer

__all__ = [
    "BlockRecurrenceMixer",
    "CombaMixer",
    "DeltaNetMixer",
    "GDN2Mixer",
    "GLAMixer",
    "GatedDeltaNetMixer",
    "GatedDeltaProductMixer",
    "InfiniMixer",
    "KDAMixer",
    "LogLinearMamba2Mixer",
    "LogLinearMixer",
    "LogLinearPlusPlusMixer",
    "LonghornMixer",
    "Mamba2Mixer",
    "Mamba3Mixer",
    "MambaMixer",
    "MelodiMixer",
    "MemorizingMixer",
    "MesaMixer",
    "MomentumDeltaNetMixer",
    "PGDNMixer",
    "PKDAMixer",
    "RWKV7Mixer",
    "RetNetMixer",
]
