"""Series models against named peers on real tables, which `python -m benchmarks.series.fetch DIR` fetches."""
