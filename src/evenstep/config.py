"""Everything a loader can be told, checked once."""
