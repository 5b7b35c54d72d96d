"""glissando."""
