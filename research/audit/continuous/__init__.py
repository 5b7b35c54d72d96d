"""The audit of the Continuous Transformer."""
