"""Training a byte-level LongNet on text, in one process or many."""
