"""A user's module that cannot be imported."""

raise RuntimeError("not today")
