"""The published claims, each measured as published and as it should be: `glissando audit`."""
