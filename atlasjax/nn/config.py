"""Model configs: frozen dataclasses that are validated on construction and can be written as JSON; and the names of the mixers.

Nothing here imports Flax, which takes as long as jax: a command line with an error is answered before it.
"""

import dataclasses
from typing import Literal

from atlasjax import check
from atlasjax.mixers.block_recurrence import BlockRecurrenceConfig
from atlasjax.mixers.elastic.config import BlockAttentionConfig, ElasticConfig
from atlasjax.mixers.gam import GAMConfig
from atlasjax.mixers.infini import InfiniConfig
from atlasjax.mixers.melodi import MelodiConfig
from atlasjax.mixers.memorizing import MemorizingConfig
from atlasjax.mixers.self_modifying import SelfModifyingConfig
from atlasjax.names import check_options, name_of, options_text, resolve
from atlasjax.nn.attention_config import AttentionConfig
from atlasjax.nn.branch_config import BranchConfig
from atlasjax.nn.caching_config import CachingConfig
from atlasjax.nn.experts_config import ExpertsConfig
from atlasjax.nn.hierarchy_config import HierarchyConfig
from atlasjax.nn.inner_loop_config import InnerLoopConfig
from atlasjax.nn.lact_config import LaCTConfig
from atlasjax.nn.memory_config import MemoryConfig
from atlasjax.nn.mla_config import MLAConfig
from atlasjax.nn.model_sizes import ModelSizes
from atlasjax.nn.multiplier_config import MultiplierConfig
from atlasjax.nn.recurrent_config import (
    DeltaProductConfig,
    GatedDeltaNetConfig,
    HeadNormConfig,
    KDAConfig,
    Mamba3Config,
    MesaConfig,
    RWKV7Config,
    SSMConfig,
)

__all__ = [
    "AttentionConfig",
    "BlockAttentionConfig",
    "BlockRecurrenceConfig",
    "BranchConfig",
    "CachingConfig",
    "DeltaProductConfig",
    "ElasticConfig",
    "ExpertsConfig",
    "GAMConfig",
    "GatedDeltaNetConfig",
    "HeadNormConfig",
    "HierarchyConfig",
    "InfiniConfig",
    "InnerLoopConfig",
    "KDAConfig",
    "LaCTConfig",
    "MLAConfig",
    "Mamba3Config",
    "MelodiConfig",
    "MemorizingConfig",
    "MemoryConfig",
    "MesaConfig",
    "ModelConfig",
    "MultiplierConfig",
    "RWKV7Config",
    "SSMConfig",
    "SelfModifyingConfig",
]

# The library's mixers: name in a config → class. By its name and not by an import, because the classes take the configs below.
# `atlasjax.nn.mixers.MIXERS` has the classes themselves.
MIXER_NAMES = {
    "memory": "atlasjax.nn.memory_mixer:MemoryMixer",
    "mac": "atlasjax.nn.hybrids.mac:MACMixer",
    "mag": "atlasjax.nn.hybrids.mag:MAGMixer",
    "mal": "atlasjax.nn.hybrids.mal:MALMixer",
    "attention": "atlasjax.nn.attention:AttentionMixer",
    "swa": "atlasjax.nn.attention:SlidingWindowMixer",
    "mla": "atlasjax.nn.latent_attention:LatentAttentionMixer",
    "block_attention": "atlasjax.nn.elastic:BlockMixer",
    "elastic": "atlasjax.nn.elastic:ElasticMixer",
    "memorizing": "atlasjax.nn.baselines.memorizing:MemorizingMixer",
    "infini": "atlasjax.nn.baselines.infini:InfiniMixer",
    "melodi": "atlasjax.nn.baselines.melodi:MelodiMixer",
    "block_recurrence": "atlasjax.nn.baselines.block_recurrence:BlockRecurrenceMixer",
    "mamba": "atlasjax.nn.baselines.mamba:MambaMixer",
    "mamba2": "atlasjax.nn.baselines.mamba2:Mamba2Mixer",
    "mamba3": "atlasjax.nn.baselines.mamba3:Mamba3Mixer",
    "retnet": "atlasjax.nn.baselines.retnet:RetNetMixer",
    "gla": "atlasjax.nn.baselines.gla:GLAMixer",
    "deltanet": "atlasjax.nn.baselines.deltanet:DeltaNetMixer",
    "gated_deltanet": "atlasjax.nn.baselines.gated_deltanet:GatedDeltaNetMixer",
    "kda": "atlasjax.nn.baselines.kda:KDAMixer",
    "gdn2": "atlasjax.nn.baselines.gdn2:GDN2Mixer",
    "mesa": "atlasjax.nn.baselines.mesa:MesaMixer",
    "gated_deltaproduct": "atlasjax.nn.baselines.gated_deltaproduct:GatedDeltaProductMixer",
    "momentum_deltanet": "atlasjax.nn.baselines.momentum_deltanet:MomentumDeltaNetMixer",
    "comba": "atlasjax.nn.baselines.comba:CombaMixer",
    "pgdn": "atlasjax.nn.baselines.preconditioned:PGDNMixer",
    "pkda": "atlasjax.nn.baselines.preconditioned:PKDAMixer",
    "rwkv7": "atlasjax.nn.baselines.rwkv7:RWKV7Mixer",
    "longhorn": "atlasjax.nn.baselines.longhorn:LonghornMixer",
    "log_linear": "atlasjax.nn.baselines.log_linear:LogLinearMixer",
    "log_linear_plus_plus": "atlasjax.nn.baselines.log_linear:LogLinearPlusPlusMixer",
    "log_linear_mamba2": "atlasjax.nn.baselines.log_linear:LogLinearMamba2Mixer",
    "gam": "atlasjax.nn.gam:GAMMixer",
    "short_conv": "atlasjax.nn.baselines.short_conv:ShortConvMixer",
    "lact": "atlasjax.nn.lact:LaCTMixer",
    "self_modifying_titans": "atlasjax.nn.self_modifying:SelfModifyingMixer",
}


def _import_own(mixers: tuple[str, ...]) -> None:
    """Imports the mixers that are named "package.module:Class", so that a mistake is an error here and not when a model is built.

    Raises:
      ValueError: as `names.resolve`, unless the class is one of the library's, which are imported on first use.
    """
    for name in mixers:
        if ":" in name and name not in MIXER_NAMES.values():
            resolve("mixer", name, {})


@dataclasses.dataclass(frozen=True)
class ModelConfig(ModelSizes):
    """A decoder-only language model: embedding, layers of (mixer, feed-forward network), norm, head.

    Attributes:
      vocab_size: vocabulary size.
      dim: width of the residual stream.
      num_layers: number of layers.
      num_heads: number of heads in each mixer.
      head_dim: size of the queries and keys of a head. None: dim / num_heads.
      value_expansion: ratio of the value size to the key size of a head, ≥ 1.
      mixer: a name in `atlasjax.nn.mixers.MIXERS`, or a tuple of names that repeats over the layers: with ("mamba", "swa") even
        layers are Mamba and odd layers are attention. The length of the tuple must divide num_layers. Name a mixer of your own
        "package.module:Class", or pass the class itself, which is stored under that name. Names joined by "+" run in parallel, and
        their outputs are added: "mamba2+attention".
      mixer_options: keyword arguments for your own mixers, a JSON object as text. A dictionary is converted to text.
      ffn: the feed-forward network after the mixer: "swiglu", without biases; "gelu", two projections with biases; "relu2", two
        projections with squared ReLU; "channel_mixing", RWKV-7's, with a token shift; "experts", a mixture of experts; or "none". A
        tuple of one of the first four, "experts" and "none" is one for each layer of the pattern of mixers.
      block: what surrounds f, the mixer or the feed-forward network: "pre_norm", x + f(norm(x)); "post_norm", x + norm(f(x)); or
        "bare", f(x), without norm and residual, which requires ffn="none". A tuple of the first two is one for each layer of the
        pattern of mixers.
      experts: the networks of layers with ffn="experts".
      memory: the memory of the mixers that have one ("memory", "mac", "mag", "mal").
      caching: Memory Caching around the recurrence of the mixers whose state is a matrix (`takes_caching`), such as "retnet" and
        "kda". None: none. That of the mixers with a memory is `memory.caching`.
      branch: a second mixer in every layer, beside the first one. None: none.
      inner_loop: further feed-forward networks in the last layers, which learn while the model reads. None: none.
      attention: the attention of the mixers that have it.
      multipliers: constants that multiply embeddings, residual stream, logits and parts of layers.
      ssm: sizes of the state space models.
      head_norm: the norm of the heads' outputs in the recurrent mixers with heads.
      gated_deltanet, gated_deltaproduct, kda, mamba3, mesa, rwkv7: the mixer of that name, and others that say so.
      block_attention, elastic, memorizing, infini, melodi, block_recurrence, gam, lact, mla: config of the mixer of that name.
      self_modifying: config of the mixer "self_modifying_titans".
      norm: norm of the residual stream: "rms"; "rms_plus_one", with 1 + scale in place of the scale; or "layer", with a bias. Norms
        inside mixers follow their papers.
      embedding_norm: whether such a norm is also applied to the embeddings, as in RWKV.
      positions: "none", or "learned": a table of max_positions entries that is added to the embedding. Longer sequences raise an
        error, and the logits of a stream beyond the table are NaN.
      max_positions: number of learned positions, ≥ 1. None with positions="none".
      dropout: dropout rate in [0, 1) for embeddings and feed-forward outputs. It applies only where dropout keys are given, as in
        training, and never in evaluation or decoding.
      conv_width: taps of the causal convolutions. 1 is a gain per channel.
      mlp_dim: hidden width of the feed-forward network. None: 8/3 dim, rounded up to a multiple of 128; 4 dim for those without
        a gate.
      tie_embeddings: whether the head is the transposed embedding.
      norm_eps: added to the mean square in every norm.
      dtype: dtype of activations and matmul inputs, "bfloat16" or "float32". Parameters, gates, memories, norm statistics and
        logits are always float32.
      remat: recompute each layer in the backward pass instead of storing its activations.

    Raises:
      ValueError: a field is out of range, or fields conflict. The message names the field, its value and what it must be.
    """

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    head_dim: int | None = None
    value_expansion: int = 1
    mixer: str | tuple[str, ...] = "memory"
    mixer_options: str = "{}"
    ffn: str | tuple[str, ...] = "swiglu"
    block: str | tuple[str, ...] = "pre_norm"
    experts: ExpertsConfig = ExpertsConfig()
    memory: MemoryConfig = MemoryConfig()
    caching: CachingConfig | None = None
    branch: BranchConfig | None = None
    inner_loop: InnerLoopConfig | None = None
    attention: AttentionConfig = AttentionConfig()
    mla: MLAConfig = MLAConfig()
    multipliers: MultiplierConfig = MultiplierConfig()
    ssm: SSMConfig = SSMConfig()
    mamba3: Mamba3Config = Mamba3Config()
    head_norm: HeadNormConfig = HeadNormConfig()
    gated_deltanet: GatedDeltaNetConfig = GatedDeltaNetConfig()
    kda: KDAConfig = KDAConfig()
    mesa: MesaConfig = MesaConfig()
    gated_deltaproduct: DeltaProductConfig = DeltaProductConfig()
    rwkv7: RWKV7Config = RWKV7Config()
    block_attention: BlockAttentionConfig = BlockAttentionConfig()
    elastic: ElasticConfig = ElasticConfig()
    memorizing: MemorizingConfig = MemorizingConfig()
    infini: InfiniConfig = InfiniConfig()
    melodi: MelodiConfig = MelodiConfig()
    block_recurrence: BlockRecurrenceConfig = BlockRecurrenceConfig()
    gam: GAMConfig = GAMConfig()
    lact: LaCTConfig = LaCTConfig()
    self_modifying: SelfModifyingConfig = SelfModifyingConfig()
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    embedding_norm: bool = False
    positions: Literal["none", "learned"] = "none"
    max_positions: int | None = None
    dropout: float = 0.0
    conv_width: int = 4
    mlp_dim: int | None = None
    tie_embeddings: bool = True
    norm_eps: float = 1e-6
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    remat: bool = True

    def __post_init__(self) -> None:
        self._check_sizes()
        check.declared(self)
        for field in dataclasses.fields(self):
            if dataclasses.is_dataclass(field.default):  # the config of a mixer
                check.instance("ModelConfig", field.name, getattr(self, field.name), type(field.default))
        check.instance("ModelConfig", "caching", self.caching, CachingConfig, optional=True)
        check.instance("ModelConfig", "branch", self.branch, BranchConfig, optional=True)
        check.instance("ModelConfig", "inner_loop", self.inner_loop, InnerLoopConfig, optional=True)
        self._name_mixers()
        self._check_pattern()
        self._check_inner_loop()

    def _check_sizes(self) -> None:
        optional = ("head_dim", "mlp_dim", "max_positions")
        names = ("vocab_size", "dim", "num_layers", "num_heads", "conv_width", "value_expansion", *optional)
        check.integers(self, dict.fromkeys(names, 1), optional)
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"ModelConfig: num_heads={self.num_heads} does not divide dim={self.dim}. "
                "Change one of them, or give head_dim."
            )
        check.number("ModelConfig", "norm_eps", self.norm_eps, above=0)
        check.number("ModelConfig", "dropout", self.dropout, least=0, below=1)
        if (self.positions == "learned") != (self.max_positions is not None):
            need = "an integer ≥ 1" if self.positions == "learned" else "None"
            raise ValueError(
                f"ModelConfig: positions={self.positions!r} needs max_positions to be {need}, got {self.max_positions!r}."
            )

    def _name_mixers(self) -> None:
        """Stores classes by their names, so that the config can be saved, and options as text, so that it has a hash."""
        alone = not isinstance(self.mixer, tuple)
        names = tuple(
            name_of("ModelConfig: mixer, or each one of a tuple of names,", mixer)
            for mixer in ((self.mixer,) if alone else self.mixer)
        )
        object.__setattr__(self, "mixer", names[0] if alone else names)
        object.__setattr__(self, "mixer_options", options_text("ModelConfig", "mixer_options", self.mixer_options))
        check_options("ModelConfig", self.pattern, self.mixer_options, self.mixer)
        _import_own(self.pattern if self.branch is None else (*self.pattern, self.branch.mixer))

    def _check_pattern(self) -> None:
        if not self.pattern or self.num_layers % len(self.pattern):
            raise ValueError(
                f"ModelConfig: mixer={self.mixer!r} is a pattern of {len(self.pattern)} layers, which must divide "
                f"num_layers={self.num_layers}."
            )
        if isinstance(self.block, tuple):
            if len(self.block) != len(self.pattern):
                raise ValueError(
                    f"ModelConfig: block={self.block!r} is for {len(self.block)} layers, must be for the {len(self.pattern)} of "
                    "the pattern of mixers."
                )
            for block in self.block:
                check.choice("ModelConfig", "each one of block", block, ("pre_norm", "post_norm"))
        else:
            check.choice("ModelConfig", "block", self.block, ("pre_norm", "post_norm", "bare"))
        self._check_ffn()

    def _check_ffn(self) -> None:
        for name in (self.ffn,) if isinstance(self.ffn, str) else self.ffn:
            check.choice("ModelConfig", "ffn, or each one of a tuple," if name is not self.ffn else "ffn", name, _FFNS)
        if len(self.ffns) != len(self.pattern):
            raise ValueError(
                f"ModelConfig: ffn={self.ffn!r} is for {len(self.ffns)} layers, must be for the {len(self.pattern)} of the "
                "pattern of mixers."
            )
        if len({*self.ffns}) == 1:  # one way to write a model
            object.__setattr__(self, "ffn", self.ffns[0])
        if len({*self.ffns} - {"experts", "none"}) > 1:
            raise ValueError(
                f"ModelConfig: ffn={self.ffn!r} should have one kind of network besides 'experts' and 'none'."
            )
        if self.block == "bare" and self.num_networks:
            raise ValueError(f"ModelConfig: block='bare' needs ffn='none', got ffn={self.ffn!r}.")

    def _check_inner_loop(self) -> None:
        if self.inner_loop is None:
            return
        layers = self.inner_loop.layers_of(self.num_layers)
        no_layer_before = f"num_layers={self.num_layers} leaves no layer before the {layers} of the inner loop"
        for why, is_refused in (
            (f"mixer={self.mixer!r} is a pattern of several; give one mixer", len(self.pattern) > 1),
            (no_layer_before, layers >= self.num_layers),
            (f"dropout={self.dropout} would make every step another one; give 0", self.dropout > 0),
            ("branch is given; a layer of the inner loop has one mixer, give branch=None", self.branch is not None),
            ("ffn='experts' has no fast weights; give another one", self.has_experts),
            ("block='bare' has no residual stream; give 'pre_norm' or 'post_norm'", "bare" in self.blocks),
        ):
            if is_refused:
                raise ValueError(f"ModelConfig: inner_loop is given, but {why}.")

    @property
    def memories(self) -> dict[str, MemoryConfig]:
        """The memories of the model and of its branch, by the fields that they are in."""
        return {"memory": self.memory} | ({} if self.branch is None else {"branch.memory": self.branch.memory})

    @property
    def branch_alone(self) -> "ModelConfig | None":
        """The model with its branch's mixer in place of its own. None without a branch."""
        branch = self.branch
        if branch is None:
            return None
        return dataclasses.replace(
            self,
            mixer=branch.mixer,
            mixer_options=branch.mixer_options,
            block="pre_norm",
            ffn=next((name for name in self.ffns if name != "none"), "none"),
            memory=branch.memory,
            attention=branch.attention,
            num_heads=self.num_heads if branch.num_heads is None else branch.num_heads,
            head_dim=self.resolved_head_dim if branch.head_dim is None else branch.head_dim,
            value_expansion=self.value_expansion if branch.value_expansion is None else branch.value_expansion,
            rwkv7=dataclasses.replace(self.rwkv7, value_residual=False),
            caching=None,
            branch=None,
        )


_FFNS = ("swiglu", "gelu", "relu2", "channel_mixing", "experts", "none")
