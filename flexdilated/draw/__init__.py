"""Pictures, as figures of matplotlib: one file each."""
