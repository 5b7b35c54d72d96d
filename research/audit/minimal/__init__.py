"""The audit of the Minimal Transformer and of its growth."""
