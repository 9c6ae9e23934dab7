"""A package from outside: an axis, a scheme and an engine, each found by an entry point."""
