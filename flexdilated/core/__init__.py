"""Patterns, calls and pieces: the foundation of every backend."""
