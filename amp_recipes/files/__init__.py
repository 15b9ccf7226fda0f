"""Answers questions about files and folders."""
