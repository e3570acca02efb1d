"""The design axes of a rule. Code asks a choice for its traits, never for its class.

A structure, an objective, a feature map, an inner optimizer or a retention is a frozen dataclass that inherits from `Structure`,
`Objective`, `Features`, `Optimizer` or `Retention`. docs/own_rule.md shows how to write your own.

There are two kinds of traits:

- Ordinary class attributes with a default in the base class, such as `Objective.uses_threshold`. Subclasses inherit them.
- Claims: exact statements about a formula that select a fast path, such as `Objective.gradient_is_error`. A claim holds for the
  class that makes it and is not inherited: a subclass of `L2` with its own loss is not treated as ℓ2. A rule without claims runs in
  the general engine, which needs only the formulas.
"""
