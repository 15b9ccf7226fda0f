"""Saves and restores what a resume or a rehearsal must put back."""
