"""The audit of the Tauformer."""
