"""Speed against named peers: `glissando bench`."""
