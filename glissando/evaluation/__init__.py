"""Held-out loss, bits per byte, accuracy and their uncertainty."""
