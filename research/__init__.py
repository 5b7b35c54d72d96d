"""The audit of published claims, the published forms, and one-off experiments; see README.md."""
