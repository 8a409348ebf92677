"""What the six files at the top import, and a first reading skips: a room for each feature."""
