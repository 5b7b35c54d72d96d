"""Measurements of one thing against another."""
