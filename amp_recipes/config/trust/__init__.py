"""Decides what a YAML may name, and builds it."""
