"""What proves the stories: that their grammar is unambiguous, and what a story costs."""
