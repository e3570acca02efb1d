"""A user's module that cannot be imported."""

raise SystemExit("not today")
