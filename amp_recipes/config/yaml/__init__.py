"""Reads, includes, overrides, resolves and writes YAML."""
