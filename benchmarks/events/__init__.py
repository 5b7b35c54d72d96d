"""Event models against a GRU on generated and real logs: `python -m benchmarks.events.compare`."""
