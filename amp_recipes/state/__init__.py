"""Saves and restores the state that a resume or a rehearsal needs."""
