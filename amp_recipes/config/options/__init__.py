"""Reads the command line and the run options."""
