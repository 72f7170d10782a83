"""What one rank does in one call: exchange rows with other ranks, attend, and merge."""
