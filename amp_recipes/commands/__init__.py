"""Runs the commands of `amp-recipes`. Imports all other rooms; no other room imports it."""
