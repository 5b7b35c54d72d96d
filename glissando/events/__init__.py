"""Events at their own times: of what kind the next one is, and when."""
