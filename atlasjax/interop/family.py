"""A family of public models as the converter sees it, and the reading of its config.json."""

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from atlasjax.check import is_finite, is_integer, shown
from atlasjax.interop.table import Row
from atlasjax.interop.tensors import listed
from atlasjax.nn import ModelConfig
from atlasjax.train.errors import ConfigError

_MOST = 2**31 - 1  # no count in a model is larger
_LARGEST = 1e30  # a larger factor would make sizes that are no numbers

# Fields of any config.json that do not change what a model computes.
_NEUTRAL = (
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "fuse_cross_entropy", "fuse_linear_cross_entropy",
    "fuse_norm", "fuse_swiglu", "fused_add_norm", "initializer_range", "max_position_embeddings", "model_type", "pad_token_id",
    "residual_in_fp32", "torch_dtype", "transformers_version", "unk_token_id", "use_cache", "use_l2warp", "_name_or_path",
)  # fmt: skip
# Fields that other versions of transformers write into every config: of labels, outputs, generation, loading and training.
INERT = (
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
    "_experts_implementation", "_experts_implementation_internal", "attn_implementation", "bad_words_ids", "begin_suppress_tokens",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label", "is_decoder", "label2id", "length_penalty",
    "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "prefix", "problem_type",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torchscript", "typical_p",
    "unsloth_fixed", "unsloth_version", "use_bfloat16",
)  # fmt: skip
# Fields with the one value that changes nothing.
_OFF: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,), "is_encoder_decoder": (False,), "pruned_heads": ({},), "quantization_config": (None,),
    "tie_encoder_decoder": (False,),
}  # fmt: skip


class Sizes(NamedTuple):
    """Limits of the files of a model's tensors. A config.json is compared with it before anything of its size is made.

    Attributes:
      tensors: number of tensors; a model has no more layers.
      axis: the longest axis of a tensor; no size of a model is larger.
    """

    tensors: int = _MOST
    axis: int = _MOST


class Fields:
    """The fields of a config.json, each of which must be understood: one that is not could change what the model computes.

    Args:
      given: the content of the file.
      name: the family, for error messages.
      sizes: limits from the files beside it.

    Raises:
      ConfigError: by every method, if a field has a value that the family cannot have here.
    """

    def __init__(self, given: Mapping[str, object], name: str, sizes: Sizes):
        self._given, self._name, self._sizes = dict(given), name, sizes

    def integer(self, name: str, default: int | None = None, *, is_axis: bool = True) -> int:
        """An integer ≥ 1. Without a default the field is required. is_axis: no tensor of the model has a shorter longest axis."""
        value = self._take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(name, value, "an integer ≥ 1")
        most = self._sizes.axis if is_axis else _MOST
        if value > most:
            what = ", the longest axis of the tensors in the files" if most < _MOST else ""
            raise self._wrong(name, value, f"an integer of at most {most:,}{what}")
        return value

    def layers(self, name: str, default: int | None = None) -> int:
        """The number of layers."""
        value, most = self.integer(name, default, is_axis=False), self._sizes.tensors
        if value > most:
            raise ConfigError(
                f"{self._name}: tensors are missing: {name} of config.json has {value:,} layers, the files have {most:,} tensors."
            )
        return value

    def integer_or(self, word: str, name: str) -> int | None:
        """An integer ≥ 1; None if the field has the value `word` or is missing."""
        if self._given.get(name) in (None, word):
            self._given.pop(name, None)
            return None
        return self.integer(name)

    def number(self, *names: str, default: float | None = None) -> float:
        """A positive number, under the first of several names that is there."""
        name = next((name for name in names if name in self._given), names[0])
        value = self._take(name, default)
        if not is_finite(value) or not 0 < value < _LARGEST:
            raise self._wrong(name, value, f"a positive number below {_LARGEST:g}")
        return float(value)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A positive number; None if the field is null, and `default` if it is missing."""
        if self._given.get(name, default) is None:
            return self._given.pop(name, None)  # type: ignore[return-value]
        return self.number(name, default=default)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers; ones if the field is missing."""
        value = self._take(name, [1.0] * count)
        if isinstance(value, list) and len(value) == count and all(is_finite(x) and 0 < x < _LARGEST for x in value):
            return tuple(float(x) for x in value)
        raise self._wrong(name, value, f"a list of {count} positive numbers below {_LARGEST:g}")

    def limits(self, name: str) -> tuple[float, float | None]:
        """A list of a lower limit ≥ 0 and an upper limit, None if that is infinite. No limits if the field is missing."""
        value = self._take(name, [0.0, math.inf])
        least, most = value if isinstance(value, list) and len(value) == 2 else (None, None)
        most = math.inf if most == {"__float__": "Infinity"} else most
        if is_finite(least) and isinstance(most, int | float) and 0 <= least < most:
            return float(least), None if most == math.inf else float(most)
        raise self._wrong(name, value, "a list of a number ≥ 0 and a larger one, or infinity")

    def rotation(self, *kinds: str) -> "Fields":
        """The fields of rotary positions that are not scaled, in `rope_parameters`, or in `rope_scaling` of older versions.

        kinds: names of a kind that changes nothing for a text, besides "default".
        """
        if self._given.get("rope_scaling"):
            old = self.inside("rope_scaling")
            if self._given.pop("rope_parameters", None) not in (None, old._given):
                raise ConfigError(
                    f"config.json of {self._name} has rope_scaling and other rope_parameters; it should have the latter."
                )
            inside = old
        else:
            self._given.pop("rope_scaling", None)
            inside = self.inside("rope_parameters")
        for name in ("rope_type", "type"):  # the second is the older one
            if inside._given.get(name) == "linear" and inside._given.get("factor") == 1:
                inside._given.pop(name)  # scaled by nothing
            inside.require(name, "default", *kinds, None)
        inside.require("factor", None, 1)
        return inside

    def theta(self, default: float | None = None) -> float | None:
        """The base of the wavelengths of rotary positions that are not scaled, there or in older versions outside; None: null."""
        outer, inside = self.optional_number("rope_theta", default), self.rotation()
        theta = inside.optional_number("rope_theta", outer)
        inside.done(())
        return theta

    def quotient(self, name: str, value: int, by_name: str, by: int) -> int:
        """value / by, which must be an integer: a size of which the config has the factors `name` and `by_name`."""
        if value % by:
            raise self._wrong(by_name, by, f"a divisor of {name}, {value}")
        return value // by

    def boolean(self, name: str, default: bool) -> bool:
        """True or False."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def require(self, name: str, *allowed: object) -> object:
        """The value of a field, the first of `allowed` if it is missing. Raises ConfigError if it is not in `allowed`."""
        value = self._given.pop(name, allowed[0])
        if value not in allowed:
            raise self._wrong(name, value, " or ".join(map(repr, allowed)) + ", the form that this library's layer has")
        return value

    def fixed(self, **values: object) -> None:
        """`require` for fields that each may have one value only."""
        for name, value in values.items():
            self.require(name, value)

    def optional_integer(self, name: str, *, is_axis: bool = True) -> int | None:
        """An integer ≥ 1; None if the field is null or missing. is_axis: as for `integer`."""
        return None if self._given.get(name) is None else self.integer(name, is_axis=is_axis)

    def integers(self, name: str, below: int, default: list[int] | None = None) -> list[int]:
        """A list of different integers ≥ 0 and below `below`. Without a default the field is required."""
        value = self._take(name, default)
        if (
            isinstance(value, list)
            and all(is_integer(n, 0) and n < below for n in value)
            and len({*value}) == len(value)
        ):
            return value
        raise self._wrong(name, value, f"a list of different integers from 0 to {below - 1}")

    def objects(self, name: str) -> "list[Fields]":
        """The fields of an object or of a list of objects, as a list. Empty if the field is null or missing."""
        value = self._given.pop(name, None)
        value = [] if value is None else [value] if isinstance(value, dict) else value
        if not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
            raise self._wrong(name, value, "an object, a list of objects or null")
        return [Fields(x, f"{self._name}, {name}", self._sizes) for x in value]

    def whole(self, name: str, value: float, what: str) -> int:
        """`value`, which a field gives, as an integer that is an axis, if it is one up to rounding. what: its unit."""
        found = round(value)
        if not math.isclose(value, found, rel_tol=1e-9) or not 1 <= found <= self._sizes.axis:
            raise ConfigError(
                f"config.json of {self._name}: {name} gives {value:g} {what}; it must be a whole number, at most "
                f"{self._sizes.axis:,}."
            )
        return found

    def ratio(self, name: str, of: int, default: int, what: str) -> int:
        """An integer that is a multiple of `of`, the value of `what`, divided by it."""
        value = self.integer(name, default)
        if value % of:
            raise self._wrong(name, value, f"a multiple of {what}, {of}")
        return value // of

    def strings(self, name: str, count: int | None, allowed: Iterable[str]) -> list[str] | None:
        """A list of strings that are in `allowed`, `count` or at least one; None if the field is missing."""
        value, known = self._given.pop(name, None), list(allowed)
        if value is None:
            return None
        counts = range(1, self._sizes.tensors + 1) if count is None else (count,)
        if isinstance(value, list) and len(value) in counts and all(x in known for x in value):
            return value
        what = "" if count is None else f"{count} "
        raise self._wrong(name, value, f"a list of {what}strings, each {' or '.join(map(repr, known))}")

    def letters(self, name: str, allowed: Iterable[str]) -> list[str] | None:
        """The letters of a text, all in `allowed`; None if the field is missing."""
        value, known = self._given.pop(name, None), list(allowed)
        if value is not None and (not isinstance(value, str) or not value or any(x not in known for x in value)):
            raise self._wrong(name, value, f"a text of the letters {', '.join(known)}")
        return None if value is None else list(value)

    def dtype(self, default: object = None) -> Literal["float32", "bfloat16"]:
        """Dtype of activations: the field's, or float32 for float16, whose range bfloat16 has not.

        default: value of the field if it is missing. None: float32.
        """
        value = default if given_dtype(self._given) is None else given_dtype(self._given)
        if value is None:
            return "float32"
        known = ("float32", "float16", "bfloat16")
        if not isinstance(value, str) or value.removeprefix("torch.") not in known:
            name = "torch_dtype" if self._given.get("dtype") is None else "dtype"
            raise self._wrong(name, value, " or ".join(map(repr, known)))
        return "bfloat16" if value.endswith("bfloat16") else "float32"

    def inside(self, name: str) -> "Fields":
        """The fields of an object inside the config; none if it is missing."""
        value = self._take(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return Fields(value, f"{self._name}, {name}", self._sizes)

    def done(self, neutral: Iterable[str]) -> None:
        """Raises ConfigError if fields are left that are neither `neutral`, nor neutral in every family, nor null."""
        for name, values in _OFF.items():
            self.require(name, *values)
        known = {*neutral, *_NEUTRAL, *INERT}
        left = [name for name, value in self._given.items() if name not in known and value is not None]
        if left:
            raise ConfigError(
                f"config.json of {self._name}: the meaning of {listed(left)} is not known here. Remove what does not change the "
                "model's function."
            )

    def _take(self, name: str, default: object) -> object:
        value = self._given.pop(name, None)
        if value is None and default is None:
            raise ConfigError(f"config.json of {self._name}: {name} is missing.")
        return default if value is None else value

    def _wrong(self, name: str, value: object, what: str) -> ConfigError:
        return ConfigError(f"config.json of {self._name}: {name} is {shown(value)}; it must be {what}.")


def given_dtype(given: Mapping[str, object]) -> object:
    """The dtype that a config.json has, under either of its names; None if it has none."""
    return given.get("torch_dtype") if given.get("dtype") is None else given["dtype"]


def mixer_pattern(mixers: Sequence[str]) -> str | tuple[str, ...]:
    """The mixers of all layers as `ModelConfig.mixer`: the shortest tuple that they repeat, or one name."""
    count = len(mixers)
    period = next(n for n in range(1, count + 1) if count % n == 0 and [*mixers] == [*mixers[:n]] * (count // n))
    return mixers[0] if period == 1 else tuple(mixers[:period])


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of public models in one form.

    Attributes:
      name: as it is shown and stored.
      mixers: names of our mixers that its layers may have. Some layer has the first one.
      is_mine: whether a config.json is of this family and form.
      to_ours: config.json, and the sizes of the files beside it → our config. Raises ConfigError if our layers cannot have this
        form.
      to_peer: our config → config.json, for a model that was not imported; None if it is exported in another form. It is checked
        by `to_ours`, which must give our config again.
      rows: our config → the table.
      matters: the fields and properties of our config ("ssm.expand" is one inside it) that decide what this family computes,
        besides the fields that matter in every model.
      kept: beginnings of the names of tensors that are no part of the language model. They are kept with the run, and exported
        unchanged.
      unused: patterns of the names of tensors that older versions have and that change nothing. Kept and exported in the same way.
      generation: fields of generation_config.json for a model that was not imported, besides the ids of tokens.
      older: pattern of the names of tensors that older versions have in the place of others → the table with them,
        from the one without them and our config.
    """

    name: str
    mixers: tuple[str, ...]
    is_mine: Callable[[Mapping[str, object]], bool]
    to_ours: Callable[[Mapping[str, object], Sizes], ModelConfig]
    to_peer: Callable[[ModelConfig], dict[str, object]] | None
    rows: Callable[[ModelConfig], list[Row]]
    matters: tuple[str, ...]
    kept: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    generation: Mapping[str, object] = dataclasses.field(default_factory=dict)
    older: Mapping[str, Callable[[list[Row], ModelConfig], list[Row]]] = dataclasses.field(default_factory=dict)

    def is_extra(self, name: str) -> bool:
        """Whether a tensor of this name is kept or unused."""
        return name.startswith(self.kept) or any(re.fullmatch(pattern, name) for pattern in self.unused)

    def table(self, config: ModelConfig, names: Iterable[str]) -> list[Row]:
        """The table for files with tensors of these names."""
        rows, known = self.rows(config), list(names)
        for pattern, changed in self.older.items():
            if any(re.search(pattern, name) for name in known):
                rows = changed(rows, config)
        return rows

    def has_layers_of(self, config: ModelConfig) -> bool:
        """Whether our config has layers with these mixers only."""
        return self.mixers[0] in config.pattern and set(config.pattern) <= set(self.mixers)

    def differences(self, config: ModelConfig, given: Mapping[str, object], sizes: Sizes = Sizes()) -> list[str]:
        """Where our config is not what a config.json says, as texts. sizes: as for `to_ours`."""
        wanted = self._what_matters(self.to_ours(given, sizes))
        return [
            f"{field} is {ours!r}; in this form it is {theirs!r}"
            for name, value in self._what_matters(config).items()
            for field, ours, theirs in (
                _differing(name, value, wanted[name]) if name in wanted else [(name, value, None)]
            )
        ]

    def _what_matters(self, config: ModelConfig) -> dict[str, object]:
        """The values that decide which function our config computes, by name."""
        found = {name: operator.attrgetter(name)(config) for name in (*_ALWAYS, *self.matters)}
        return found | _attention(config)


def _differing(name: str, ours: object, theirs: object) -> Iterator[tuple[str, object, object]]:
    """The fields in which two values of configs differ, by their options' names.

    Floats are equal up to rounding: theirs may be a product that ours was not computed by.
    """
    if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        for field in dataclasses.fields(ours):
            yield from _differing(f"{name}.{field.name}", getattr(ours, field.name), getattr(theirs, field.name))
    elif isinstance(ours, float) and isinstance(theirs, float):
        if not math.isclose(ours, theirs, rel_tol=1e-9):
            yield name, ours, theirs
    elif ours != theirs:
        yield name, ours, theirs


def _attention(config: ModelConfig) -> dict[str, object]:
    """The values that decide the function of layers with attention. Empty if there are none."""
    given = config.attention
    if not {"attention", "swa"} & set(config.mixers):
        return {}
    names = ("rope_theta", "qk_norm", "gate", "bias", "persistent_tokens", "conv_width")
    found = {f"attention.{name}": getattr(given, name) for name in names}
    if given.bias:
        found["attention.output_bias"] = given.output_bias
    if "swa" in config.pattern:
        found["attention.window"] = given.window
    sizes = config.attention_sizes
    found["attention.scale"] = sizes.key_dim**-0.5 if given.scale is None else given.scale
    return found | {"attention_sizes": sizes, "attention.rope_dim": given.rope_dim or sizes.key_dim}


# Fields that decide the function of every model.
_ALWAYS = (
    "vocab_size", "dim", "num_layers", "pattern", "caching", "ffn", "blocks", "multipliers", "norm", "embedding_norm", "positions",
    "tie_embeddings", "norm_eps",
)  # fmt: skip
