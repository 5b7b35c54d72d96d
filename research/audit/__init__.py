"""The published claims, each measured as published and as it should be: `python -m research.audit`."""
