"""The audit of the Hybrid ODE Transformer."""
