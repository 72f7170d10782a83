"""What every backend builds on: pattern, definition, one call, boxes of rows. Holds nothing itself."""
