"""Several models under one equal budget, and the report: `glissando compare`."""
