"""The commands for slides."""
