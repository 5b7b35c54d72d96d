"""The audit of the Liquid State-Space Model."""
