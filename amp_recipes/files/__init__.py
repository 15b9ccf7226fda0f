"""Reads, writes, checks and locks files and folders."""
