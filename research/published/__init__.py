"""The published forms, as their authors made them, small and plain; used by the audit and by benchmarks alone."""
