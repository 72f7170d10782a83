"""Patterns, calls and pieces: the foundation of every engine."""
