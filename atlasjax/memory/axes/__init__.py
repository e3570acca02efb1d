"""What the choices of a rule have in common: values that code asks for traits, never for their class.

A structure, an objective, a feature map, an inner optimizer or a retention is a frozen dataclass that inherits from `Structure`,
`Objective`, `Features`, `Optimizer` or `Retention`. The library's own are examples of them; docs/own_rule.md writes others.

Two kinds of traits:

- Ordinary class attributes, with a default in the base class, such as `Objective.uses_threshold`. Subclasses inherit them.
- Claims: exact statements about a formula, by which a fast path is chosen, such as `Objective.gradient_is_error`. A claim holds for
  the class that makes it and is not inherited: a subclass of `L2` with a loss of its own is not taken for ℓ2. Without any claim a
  rule runs in the general engine, which needs only the formulas.
"""
