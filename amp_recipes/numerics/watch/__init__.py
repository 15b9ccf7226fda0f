"""Watches the ops of a step."""
