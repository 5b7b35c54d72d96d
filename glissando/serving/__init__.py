"""Many texts at once from one model, over HTTP: `glissando serve`, the `[serve]` extra."""
